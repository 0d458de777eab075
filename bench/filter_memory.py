"""Memory of a filter worker over files of the shapes that break readers: `make bench-memory`.

Makes a textbooks file of `--mb` megabytes in each shape (many small row groups; one row group for the
whole file; one row of 40 MB among small ones; two of them side by side), and a StackExchange file with
a question and an answer of 40 MB of HTML. Filters it by `rqwen3 corpus filter` in a process of its own,
and samples that process' resident memory. Costs the file twice in disk space and, for 2 GB, some
minutes a shape. The last line is one JSON object; flat_ratio compares the peak of the last quarter of
the time in which the file is written with that of the first. Making the shape with one row group takes
as much memory here as the file is long, twice.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from rqwen3_pipeline.corpus.build import run_stage
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.settings import RunRoot, Settings

PROFILE = """
[run]
name = "memory"
[data]
origin = "folder"
[data.{source}]
[model]
vocab_size = 151936
d_model = 64
n_layer = 2
num_heads = 4
num_kv_heads = 2
head_dim = 16
intermediate_size = 192
max_seq_len = 256
[training]
max_steps = 1000
warmup_steps = 10
seq_len = 256
micro_batch_size = 4
"""
SHAPES = ("row_groups", "one_row_group", "fat_row", "fat_rows", "fat_post")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])
ANSWERS = pa.list_(
    pa.struct({"answer_id": pa.int64(), "pm_score": pa.int64(), "selected": pa.bool_(), "text": pa.string()})
)
POSTS = pa.schema([("qid", pa.int64()), ("question", pa.string()), ("answers", ANSWERS)])
ROWS, FAT_BYTES = 1000, 40_000_000
LIMIT_MB, FLAT_WITHIN = 600, 0.2
FAT = SHAPES[2:]
"""What one of these takes in its middle may stay with the process; the limit is theirs too."""


def rows(number: int, draw: random.Random) -> pa.RecordBatch:
    """A thousand documents of some 5,000 characters; each fourth has characters that NFC looks at."""
    texts = [draw.randbytes(2500).hex() + (" naïve e\u0301" if i % 4 == 0 else "") for i in range(ROWS)]
    return pa.record_batch({"id": [f"{number}-{i}" for i in range(ROWS)], "text": texts}, schema=SCHEMA)


def fat_rows(count: int) -> pa.Table:
    """Rows of 40 MB each; a single 🦉 makes Python take 4 bytes a character."""
    texts = [f"the café {i} " * (FAT_BYTES // 12) + "🦉" for i in range(count)]
    return pa.table({"id": ["fat"] * count, "text": texts}, schema=SCHEMA)


def posts(number: int, draw: random.Random, fat: bool) -> pa.Table:
    """A hundred questions of some 5,000 characters with an answer; or one question, then one answer, of 40 MB."""

    def post(question: str, text: str, row: int) -> dict[str, object]:
        answer = {"answer_id": row, "pm_score": 1, "selected": True, "text": text}
        return {"qid": row, "question": question, "answers": [answer]}

    if fat:
        html = "<p>so <b>i</b></p>" * (FAT_BYTES // 18)
        return pa.Table.from_pylist([post(html, "<p>yes</p>", 0), post("<p>no?</p>", html, 1)], schema=POSTS)
    words = [f"<p>{draw.randbytes(1200).hex()}</p><pre><code>x &lt; {i}</code></pre>" for i in range(100)]
    return pa.Table.from_pylist([post(word, word, 100 * number + i) for i, word in enumerate(words)], schema=POSTS)


def make(path: Path, shape: str, size_mb: int) -> None:
    """Write the file, of `size_mb` or a batch more."""
    draw = random.Random(1)
    path.parent.mkdir(parents=True)
    if shape == "fat_post":
        with pq.ParquetWriter(path, POSTS, compression="snappy") as writer:
            for number in range(2 * size_mb):
                writer.write_table(posts(number, draw, fat=number == size_mb))
        return
    batches, fat = range(-(-size_mb // 5)), {"fat_row": 1, "fat_rows": 2}.get(shape, 0)
    if shape == "one_row_group":
        whole = pa.Table.from_batches([rows(number, draw) for number in batches])
        pq.write_table(whole, path, compression="snappy", row_group_size=len(whole))
        return
    with pq.ParquetWriter(path, SCHEMA, compression="snappy") as writer:
        for number in batches:
            writer.write_table(pa.Table.from_batches([rows(number, draw)]), row_group_size=250)
            if fat and number == len(batches) // 2:
                writer.write_table(fat_rows(fat))


def measure(command: list[str], output: Path) -> tuple[list[int], float]:
    """Run a command; its resident bytes every 20 ms while it writes `output`, and its seconds."""
    began, samples, before = time.monotonic(), list[int](), list[int]()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            writing = any(output.parent.glob(f".{output.name}.*.tmp"))
            (samples if writing else before).append(process.memory_info().rss)
            time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return samples, time.monotonic() - began


def run(folder: Path, shape: str, size_mb: int) -> dict[str, float | int | bool]:
    """Make, lock, fetch and filter one file."""
    profile = folder / "memory.toml"
    source = "stackexchange" if shape == "fat_post" else "textbooks"
    profile.write_text(PROFILE.format(source=source))
    make(folder / "sources" / f"{source}.parquet", shape, size_mb)
    root, config = RunRoot(folder / "root"), corpus_config(Settings(profile=str(profile)).run_config)
    lock = lock_folder(root, config, folder / "sources")
    assert run_stage("raw", root, config, lock, [(source, "00000")])[0].error is None
    shutil.rmtree(folder / "sources")
    command = [sys.executable, "-m", "rqwen3_pipeline.cli", "--profile", str(profile), "--home", str(root.path)]
    samples, seconds = measure([*command, "corpus", "filter", "--workers", "1"], root.filtered(source, "00000"))
    file = lock.file(source, "00000")
    quarter = max(len(samples) // 4, 1)
    first, last = max(samples[:quarter]), max(samples[-quarter:])
    return {
        "file_mb": round(file.size_bytes / 1e6),
        "rows": file.rows,
        "row_groups": pq.ParquetFile(root.raw(source, file.name)).num_row_groups,
        "peak_mb": round(max(samples) / 1e6),
        "first_quarter_mb": round(first / 1e6),
        "last_quarter_mb": round(last / 1e6),
        "flat_ratio": round(last / first, 3),
        "seconds": round(seconds, 1),
        "rows_per_s": round(file.rows / seconds),
        "passed": max(samples) < LIMIT_MB * 1e6 and (shape in FAT or last <= (1 + FLAT_WITHIN) * first),
    }


def main() -> None:
    """Measure every shape; exit 1 if one takes too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=2000, help="size of each file")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this shape")
    parser.add_argument("--folder", type=Path, help="where the files are made; the temporary folder by default")
    options = parser.parse_args()
    found = {}
    for shape in options.shape or SHAPES:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="filter-memory-") as folder:
            found[shape] = run(Path(folder), shape, options.mb)
        print(shape, found[shape], flush=True)
    print(json.dumps({"benchmark": "filter_memory", "limit_mb": LIMIT_MB, "shapes": found}))
    sys.exit(not all(result["passed"] for result in found.values()))


if __name__ == "__main__":
    main()
