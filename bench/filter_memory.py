"""Memory of a filter worker over files of the shapes that break readers: `make bench-memory`.

Makes a textbooks file of `--mb` megabytes in each shape (many small row groups; one row group for the
whole file; one row of 40 MB among small ones), filters it by `rqwen3 corpus filter` in a process of its
own, and samples that process' resident memory. Costs the file twice in disk space and, for 2 GB, some
minutes a shape. The last line is one JSON object; flat_ratio compares the peak of the last quarter
of the time in which the file is written with that of the first. Making the shape with one row group
takes as much memory here as the file is long, twice.
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
[data.textbooks]
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
SHAPES = ("row_groups", "one_row_group", "fat_row")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])
ROWS, FAT_BYTES = 1000, 40_000_000
LIMIT_MB, FLAT_WITHIN = 600, 0.2


def rows(number: int, draw: random.Random) -> pa.RecordBatch:
    """A thousand documents of some 5,000 characters; each fourth has characters that NFC looks at."""
    texts = [draw.randbytes(2500).hex() + (" naïve e\u0301" if i % 4 == 0 else "") for i in range(ROWS)]
    return pa.record_batch({"id": [f"{number}-{i}" for i in range(ROWS)], "text": texts}, schema=SCHEMA)


def make(path: Path, shape: str, size_mb: int) -> None:
    """Write the file, of `size_mb` or a batch more."""
    draw = random.Random(1)
    path.parent.mkdir(parents=True)
    batches = range(-(-size_mb // 5))
    with pq.ParquetWriter(path, SCHEMA, compression="snappy") as writer:
        if shape == "one_row_group":
            whole = pa.Table.from_batches([rows(number, draw) for number in batches])
            writer.write_table(whole, row_group_size=len(whole))
            return
        for number in batches:
            writer.write_table(pa.Table.from_batches([rows(number, draw)]), row_group_size=250)
            if shape == "fat_row" and number == len(batches) // 2:  # a single 🦉 makes Python take 4 bytes a character
                fat = "the café " * (FAT_BYTES // 10) + "🦉"
                writer.write_table(pa.table({"id": ["fat"], "text": [fat]}, schema=SCHEMA))


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
    profile.write_text(PROFILE)
    make(folder / "sources" / "textbooks.parquet", shape, size_mb)
    root, config = RunRoot(folder / "root"), corpus_config(Settings(profile=str(profile)).run_config)
    lock = lock_folder(root, config, folder / "sources")
    assert run_stage("raw", root, config, lock, [("textbooks", "00000")])[0].error is None
    shutil.rmtree(folder / "sources")
    command = [sys.executable, "-m", "rqwen3_pipeline.cli", "--profile", str(profile), "--home", str(root.path)]
    samples, seconds = measure([*command, "corpus", "filter", "--workers", "1"], root.filtered("textbooks", "00000"))
    file = lock.file("textbooks", "00000")
    quarter = max(len(samples) // 4, 1)
    first, last = max(samples[:quarter]), max(samples[-quarter:])
    return {
        "file_mb": round(file.size_bytes / 1e6),
        "rows": file.rows,
        "row_groups": pq.ParquetFile(root.raw("textbooks", file.name)).num_row_groups,
        "peak_mb": round(max(samples) / 1e6),
        "first_quarter_mb": round(first / 1e6),
        "last_quarter_mb": round(last / 1e6),
        "flat_ratio": round(last / first, 3),
        "seconds": round(seconds, 1),
        "rows_per_s": round(file.rows / seconds),
        "passed": max(samples) < LIMIT_MB * 1e6 and (shape == "fat_row" or last <= (1 + FLAT_WITHIN) * first),
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
