"""datatrove's way over the same parquet files: read, filter by length, tokenize; for `bench/corpus.py`.

Runs in a virtual environment of its own that has datatrove 0.10.1 and nothing of ours. No
deduplication, no shuffling, HTML as it is: it does less than our way does. Prints one JSON object.

    python bench/corpus_datatrove.py CORPUS OUT TOKENIZER WORKERS PATHS
"""

import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

MIN_CHARS, TOKEN_BYTES = 200, 4


def document(_, row: dict, path: str, number: int) -> dict:
    """A row as datatrove wants it; a question is followed by its answer."""
    text = row.get("text") or row.get("content") or ""
    if "question" in row:
        text = "\n\n".join([row["question"], *(answer["text"] for answer in row["answers"][:1])])
    return {"text": text, "id": f"{path}#{number}", "media": [], "metadata": {}}


def long_enough(document) -> bool:
    """The length that most of our filters ask for."""
    return len(document.text) >= MIN_CHARS


def main() -> None:
    """Run the pipeline, a task a process."""
    corpus, out, tokenizer, workers, paths = sys.argv[1:]
    LocalPipelineExecutor(
        pipeline=[
            ParquetReader(corpus, paths_file=paths, adapter=document),
            LambdaFilter(long_enough),
            DocumentTokenizer(out, tokenizer, eos_token="<|endoftext|>", shuffle_documents=False),
        ],
        tasks=int(workers),
        workers=int(workers),
        logging_dir=f"{out}-logs",
    ).run()
    tokens = sum(path.stat().st_size for path in Path(out).rglob("*.ds")) // TOKEN_BYTES
    print(json.dumps({"tokens": tokens}))


if __name__ == "__main__":
    main()
