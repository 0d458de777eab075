"""Bring benchmarks' rows from the Hub, or from its cache, into a data folder that nodes without network read.

Written as `<data>/<folder>/<split>.parquet` in the Hub's columns, with the origin and the SHA-256
beside it. Rows are checked, and their origin is written, before they get their name. Costs some 30 MB for all of them.

    python -m model.benchmark_data --data DIR --tasks arc_easy,mmlu [--cache-only]
"""

import argparse
import os
import sys
from pathlib import Path

from model.benchmarks import Benchmark, data_file, members, read_rows
from model.errors import EnvironmentProblem, RQwen3Error, SourceError
from model.files import atomic_path, sha256_file, write_json

OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def go_offline() -> None:
    """Keep Hugging Face's libraries from looking for anything on the Hub; they read this when imported."""
    for switch in OFFLINE_SWITCHES:
        os.environ.setdefault(switch, "1")


def fetch(task: Benchmark, data: Path) -> Path:
    """Write a task's rows into the data folder, from the Hub or, where that is switched off, from its cache.

    Raises:
        EnvironmentProblem: the data set can't be had, for want of a network or for another reason.
        SourceError: it lacks columns or labels; nothing is written.
    """
    import datasets

    try:
        rows = datasets.load_dataset(task.dataset, task.config, split=task.split)
    except Exception as error:  # the library raises of all kinds: no network, no such data set, no permission
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EnvironmentProblem(
            f"{task.name}: {task.dataset} can't be had ({reason[:200]}). Where there is a network: "
            "rqwen3 eval --prefetch; or give a folder that has it: --data DIR"
        ) from error
    path = data / task.folder / f"{task.split}.parquet"
    with atomic_path(path) as temporary:
        rows.to_parquet(temporary)  # pyright: ignore[reportAttributeAccessIssue] one split is a Dataset
        try:
            read_rows(temporary, task, path.suffix)
        except SourceError as error:
            raise SourceError(f"{task.name}: what {task.dataset} gave can't be scored. {error}") from error
        origin = {"dataset": task.dataset, "config": task.config, "split": task.split}
        write_json(path.with_suffix(".origin.json"), {**origin, "sha256": sha256_file(temporary)})
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0, or 1 if a benchmark could not be had."""
    parser = argparse.ArgumentParser(prog="python -m model.benchmark_data", description="Fetch benchmarks.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", required=True, help="names, separated by commas")
    parser.add_argument("--cache-only", action="store_true", help="don't ask the Hub")
    options = parser.parse_args(arguments)
    if options.cache_only:
        go_offline()
    failed = 0
    try:
        for task in [task for name in options.tasks.split(",") for task in members(name)]:
            there = data_file(options.data, task)
            try:
                print(f"{task.name}: {there or fetch(task, options.data)}", flush=True)
            except (EnvironmentProblem, SourceError) as error:
                failed += 1
                print(f"error: {error}", file=sys.stderr, flush=True)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
