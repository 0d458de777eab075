"""The corpus' speed against datatrove and against the tokenizer alone: `make bench-corpus`.

On a real corpus of Debian documentation and installed packages in our sources' columns (see
`corpus_material`), in interleaved rounds, each part in fresh processes:

    build      `rqwen3 corpus build`, from raw parquet to the manifest; the whole command
    stage      our tokenize stage again, from the start of its workers: the vocabulary, the shards, the oracle
    alone      fastokens on the same texts in memory: the vocabulary, then batches of our size
    datatrove  0.10.1's reader, length filter and tokenizer on the same files; the whole command

Shares compare with `alone` from a cold start, the loading of the vocabulary on both sides; what they
are against its encoding alone is printed beside. Medians over the rounds; the last line is one JSON
object. Some twenty minutes on two quiet cores for 900 MB and three rounds, and 9 GB of disk; the first
call also downloads some 600 MB of packages and takes six minutes to make the corpus.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.corpus_material import assemble
from model.errors import SourceError
from model.files import sha256_file
from rqwen3_pipeline.corpus.hub import fetch_tokenizer
from rqwen3_pipeline.corpus.sources import QWEN3_SHA256

DATATROVE = "datatrove[io,processing]==0.10.1"
SAMPLE_S = 0.1
"""Between looks at the workers' memory; what a look costs, a few milliseconds, slows them on two cores."""
PROFILE = """
[run]
name = "bench"
[data]
origin = "folder"
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
max_steps = 10000
seq_len = 256
micro_batch_size = 32
"""
"""The recipe's sources, limits and shares; a model as small as can be, since none is trained."""


class Bench:
    """The folder of the bench, and the parts that are measured in it."""

    def __init__(self, folder: Path, tokenizer: Path, workers: int) -> None:
        """Write the profile; nothing is measured yet."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tokenizer, self.workers = folder, tokenizer, workers
        self.corpus, self.root, self.profile = folder / "corpus", folder / "root", folder / "bench.toml"
        self.profile.write_text(PROFILE)

    @property
    def datatrove(self) -> Path:
        """The Python that has datatrove; its environment is made when it is first asked for."""
        python = self.folder / "datatrove-venv" / "bin" / "python"
        mark = python.parents[1] / "complete"
        if not mark.exists():
            shutil.rmtree(python.parents[1], ignore_errors=True)
            venv.create(python.parents[1], with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", DATATROVE], check=True)
            mark.touch()
        return python

    def build(self) -> dict[str, Any]:
        """Our whole way into an empty run root, with the memory of its workers."""
        shutil.rmtree(self.root, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "rqwen3_pipeline.cli",
            "--profile",
            str(self.profile),
            "--home",
            str(self.root),
        ]
        command += ["--workers", str(self.workers), "corpus", "build"]
        command += ["--sources", str(self.corpus), "--tokenizer", str(self.tokenizer)]
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            samples = self._watch(child)
        seconds = time.monotonic() - began
        if child.returncode:
            raise SystemExit(f"corpus build ended with {child.returncode}:\n{self._errors}")
        sources = json.loads((self.root / "manifest.json").read_text())["sources"]
        tokens = sum(source["tokens"] + source["heldout_tokens"] for source in sources.values())
        return {"seconds": seconds, "tokens": tokens} | memory(samples)

    def _watch(self, child: "subprocess.Popen[str]") -> dict[int, list[tuple[bool, int]]]:
        """Resident bytes of each worker, and whether the tokens were being made, until the command ends."""
        samples: dict[int, list[tuple[bool, int]]] = {}
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(child.stderr or ()))
        reader.start()
        parent = psutil.Process(child.pid)
        while child.poll() is None:
            tokens = any((self.root / "tokens").glob(".*.bin.*.tmp"))
            try:
                for worker in parent.children(recursive=True):
                    samples.setdefault(worker.pid, []).append((tokens, worker.memory_info().rss))
            except psutil.NoSuchProcess:
                pass
            time.sleep(SAMPLE_S)
        reader.join()
        self._errors = "".join(lines[-20:])
        return samples

    def part(self, name: str) -> dict[str, Any]:
        """One of `corpus_parts` in a process of its own."""
        command = [sys.executable, "-m", "bench.corpus_parts", name, str(self.root), str(self.profile)]
        threads = {"RAYON_NUM_THREADS": str(self.workers), "TOKENIZERS_PARALLELISM": "true"}
        return run([*command, str(self.workers)], os.environ | threads)

    def their_way(self) -> dict[str, Any]:
        """Datatrove on the same files, dealt out so that its tasks are about even."""
        out = self.folder / "datatrove"
        for folder in (out, self.folder / "datatrove-logs"):
            shutil.rmtree(folder, ignore_errors=True)
        files = sorted(self.corpus.glob("*/*.parquet"), key=lambda path: (-path.stat().st_size, path))
        paths = self.folder / "paths.txt"
        paths.write_text("".join(f"{path.relative_to(self.corpus)}\n" for path in files))
        script = Path(__file__).with_name("corpus_datatrove.py")
        words = (self.datatrove, script, self.corpus, out, self.tokenizer, self.workers, paths)
        began = time.monotonic()
        result = run([str(word) for word in words], os.environ | {"TOKENIZERS_PARALLELISM": "false"})
        result["seconds"] = time.monotonic() - began
        shutil.rmtree(out, ignore_errors=True)
        return result


def with_cpu(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part's result with the CPU seconds of its processes, which a busy machine stretches less than the clock.

    Those of datatrove's workers are missing, since a server of its own starts them.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = part()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result | {"cpu_seconds": round(spent, 1)}


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command whose last line is JSON."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def memory(samples: dict[int, list[tuple[bool, int]]]) -> dict[str, float]:
    """The largest worker's peak, and how its peak grew from the first to the last quarter of tokenizing.

    The first quarter begins when both the vocabulary and the first batch are there: when a shard is open.
    """
    peak = max(rss for found in samples.values() for _, rss in found)
    growth = []
    for found in samples.values():
        busy = [rss for tokens, rss in found if tokens]
        if len(busy) >= 8:
            growth.append(max(busy[-(len(busy) // 4) :]) / max(busy[: len(busy) // 4]))
    return {"peak_worker_mib": peak / 2**20, "memory_growth": max(growth, default=1.0)}


def find_tokenizer(named: Path | None) -> Path:
    """Qwen3's tokenizer.json: as named, from the environment, or from the Hub or its cache."""
    path = named or (Path(os.environ["RQWEN3_TOKENIZER"]) if os.environ.get("RQWEN3_TOKENIZER") else None)
    if path is None:
        try:
            path = fetch_tokenizer()
        except SourceError as error:
            raise SystemExit(
                f"{error}\nHere: --tokenizer FILE, RQWEN3_TOKENIZER=FILE, or make … TOKENIZER=FILE."
            ) from error
    if not path.is_file() or sha256_file(path) != QWEN3_SHA256:
        raise SystemExit(f"{path}: not Qwen3's tokenizer.json (SHA-256 {QWEN3_SHA256[:12]}…). Give --tokenizer FILE.")
    return path.resolve()


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds, of ratios taken within each."""
    median = statistics.median

    def pace(name: str) -> list[float]:
        return [found[name]["tokens"] / found[name]["seconds"] for found in rounds]

    alone = [
        found["alone"]["tokens"] / (found["alone"]["load_seconds"] + found["alone"]["encode_seconds"])
        for found in rounds
    ]
    encoding = [found["alone"]["tokens"] / found["alone"]["encode_seconds"] for found in rounds]
    build, stage = pace("build"), pace("stage")
    against = {
        "share_tokenize_stage": median(a / b for a, b in zip(stage, alone, strict=True)),
        "share_end_to_end": median(a / b for a, b in zip(build, alone, strict=True)),
    }
    strict = {
        "stage": median(a / b for a, b in zip(stage, encoding, strict=True)),
        "end to end": median(a / b for a, b in zip(build, encoding, strict=True)),
    }
    print(f"against its encoding alone, our loading counted and its not: {strict}")
    mega = {
        name: round(median(values) / 1e6, 2)
        for name, values in (("build", build), ("stage", stage), ("alone", alone), ("encoding alone", encoding))
    }
    print(f"million tokens/s: {mega}")
    if "datatrove" in rounds[0]:
        faster = median(found["datatrove"]["seconds"] / found["build"]["seconds"] for found in rounds)
        print(f"the same files in {faster:.1f} times less time than datatrove, which makes tokens of HTML's tags too")
    theirs = [a / b for a, b in zip(build, pace("datatrove"), strict=True)] if "datatrove" in rounds[0] else []
    result = {"tokens_per_s_ratio_datatrove": median(theirs) if theirs else None} | against
    result |= {name: median(found["build"][name] for found in rounds) for name in ("peak_worker_mib", "memory_growth")}
    return {name: value if value is None else round(value, 3) for name, value in result.items()}


def main() -> None:
    """Assemble, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("var/bench/corpus"), help="where all of it is kept")
    parser.add_argument("--mb", type=int, default=900, help="size of the corpus' text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes, of both ways")
    parser.add_argument("--tokenizer", type=Path, help="Qwen3's tokenizer.json [RQWEN3_TOKENIZER, or the Hub]")
    parser.add_argument("--exact", action="store_true", help="compare every id with `tokenizers`, and measure nothing")
    parser.add_argument("--without-datatrove", action="store_true", help="leave the slow half out")
    options = parser.parse_args()
    bench = Bench(options.folder.resolve(), find_tokenizer(options.tokenizer), options.workers)
    mix = assemble(bench.corpus, bench.folder / "packages", options.mb)
    print("\n".join(f"{source:<14} {facts}" for source, facts in mix.items()))
    print(f"in all {sum(facts['mb'] for facts in mix.values()):.0f} MB of the {options.mb} MB wanted", flush=True)
    if options.exact:
        bench.build()
        found = bench.part("exact")
        print(json.dumps({"documents": found["documents"], "ids": found["ids"], "different": len(found["different"])}))
        sys.exit(bool(found["different"]))
    rounds = []
    parts = {"build": bench.build, "stage": lambda: bench.part("stage"), "alone": lambda: bench.part("alone")}
    parts |= {} if options.without_datatrove else {"datatrove": bench.their_way}
    for number in range(options.rounds):
        found = {name: with_cpu(part) for name, part in parts.items()}
        rounds.append(found)
        print(f"round {number + 1}: {json.dumps(found)}", flush=True)
    print(json.dumps(summary(rounds)))


if __name__ == "__main__":
    main()
