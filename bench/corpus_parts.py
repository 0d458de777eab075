"""The parts of `bench/corpus.py` that need a process of their own; each prints one JSON object.

    python -m bench.corpus_parts stage|alone|exact ROOT PROFILE WORKERS

`stage` makes the tokens of a built corpus again, `alone` gives fastokens the same texts from memory,
`exact` compares the ids of every document in the shards with those of `tokenizers`. The caller sets
the number of threads, RAYON_NUM_THREADS; a worker of the stage has one.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
import pyarrow.parquet as pq

from model.shard_format import docs_path
from rqwen3_pipeline.corpus.build import build_corpus, items_of
from rqwen3_pipeline.corpus.encoder import Encoder
from rqwen3_pipeline.corpus.filtered_file import GROUP_BYTES
from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.corpus.stamps import tokens_stamp_path
from rqwen3_pipeline.settings import RunRoot, Settings


def stage(root: RunRoot, profile: str, workers: int) -> dict[str, Any]:
    """Our stage: from the moment when all before it is found to be there to the last stamp.

    That takes in what a whole build does while it filters: starting the workers and loading the vocabulary.
    """
    run = Settings(profile=profile).run_config
    config, lock = corpus_config(run), read_lock(root)
    for source, key in items_of("tokens", config, lock):
        tokens_stamp_path(root, source, key).unlink()
    ended: dict[str, float] = {}
    report = build_corpus(
        root,
        config,
        run.training,
        lock.origin,
        workers=workers,
        progress=lambda outcome: ended.update({outcome.stage: time.monotonic()}),
    )
    return {"seconds": ended["tokens"] - ended["survivors"], "tokens": report["tokens"] + report["heldout_tokens"]}


def survivors(root: RunRoot) -> Iterator[tuple[str, str, list[int], list[str]]]:
    """Source, key, rows and texts of what was tokenized, a filtered file at a time."""
    for path in sorted(root.path.glob("filtered/*/*.parquet")):
        source, key = path.parent.name, path.stem
        table = pq.read_table(path, columns=["row", "text"]).take(np.load(root.survivors(source, key)))
        yield source, key, table.column("row").to_pylist(), table.column("text").to_pylist()


def alone(root: RunRoot) -> dict[str, Any]:
    """The engine and nothing else: all texts once, from memory, in a process that has done nothing before.

    In batches like ours: with all texts in one call it takes more than twice as long, moving the outcome about.
    """
    batches: list[list[str]] = []
    room = 0
    for text in (text for *_, found in survivors(root) for text in found):
        if room <= 0:
            batches.append([])
            room = GROUP_BYTES
        batches[-1].append(text)
        room -= len(text)
    began = time.monotonic()
    content = json.loads(root.tokenizer.read_bytes())
    content |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    engine = fastokens.Tokenizer.from_json_str(json.dumps(content))
    loaded = time.monotonic()
    tokens = sum(len(engine.encode_batch_flat(batch)[0]) // 4 for batch in batches)
    ended = time.monotonic()
    return {"load_seconds": loaded - began, "encode_seconds": ended - loaded, "tokens": tokens}


def shard_ids(root: RunRoot, source: str, key: str) -> dict[int, np.ndarray]:
    """The ids of every document of a partition, without the end of text, by row."""
    found: dict[int, np.ndarray] = {}
    for folder in (root.tokens, root.heldout):
        for shard in sorted(folder.glob(f"{source}-{key}-*.bin")):
            ids_ = np.fromfile(shard, dtype="<u4")
            table = pq.read_table(docs_path(shard), columns=["end", "tokens", "row"]).to_pydict()
            for end, tokens, row in zip(table["end"], table["tokens"], table["row"], strict=True):
                found[row] = ids_[end - tokens : end - 1]
    return found


def exact(root: RunRoot) -> dict[str, Any]:
    """Every id of every document by the oracle; takes a CPU-second for each 0.7 MB."""
    encoder = Encoder(root.tokenizer.read_bytes())
    documents, ids, different = 0, 0, list[str]()
    for source, key, rows, texts in survivors(root):
        found = shard_ids(root, source, key)
        for start in range(0, len(rows), 64):
            expected = encoder.encode_by_oracle(texts[start : start + 64])
            for row, expected_ in zip(rows[start : start + 64], expected, strict=True):
                documents, ids = documents + 1, ids + len(expected_)
                if not np.array_equal(found[row], expected_):
                    different.append(f"{source}/{key} row {row}")
        print(f"{source}/{key}: {documents:,} documents, {ids:,} ids, {len(different)} differ", file=sys.stderr)
    return {"documents": documents, "ids": ids, "different": different}


def main() -> None:
    """Do the part that is named."""
    part, folder, profile, workers = sys.argv[1:]
    root = RunRoot(Path(folder))
    parts = {
        "stage": lambda: stage(root, profile, int(workers)),
        "alone": lambda: alone(root),
        "exact": lambda: exact(root),
    }
    print(json.dumps(parts[part]()))


if __name__ == "__main__":
    main()
