"""Memory and time of deduplication by buckets: `make bench-dedup`.

Makes digests by a seeded generator (a stated share of them copies, within the file's source and from
the source before it), in sixteen files, and lets a process of its own decide who survives, as
`survivors` does: comparison, survivors, and the table of who shadowed whom. Extra memory is that
process's peak (VmHWM, which counts every mapped page) less what it held before it began; the digests
are read and not held, so nothing is subtracted for them. The outcome's counts are compared with the
generator's. Costs 32 bytes a digest of disk space. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rqwen3_pipeline.corpus.buckets import DIGEST_BYTES
from rqwen3_pipeline.corpus.dedup import decide
from rqwen3_pipeline.settings import RunRoot

GROUP, MEMBERS = "wikipedia_fineweb_edu", ("wikipedia", "fineweb_edu")
FILES = 16
WITHIN, ACROSS = 0.10, 0.05
"""Shares of a file's documents that are copies of one in its own source, and of one in the first source."""
LIMIT_MB, LIMIT_CPU_S = 700, 10


def digests_of(numbers_: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """A digest for each number: four rounds of splitmix64, the same for equal numbers."""
    word_ = np.empty((len(numbers_), 4), dtype=np.uint64)
    state_ = numbers_ * np.uint64(0x9E3779B97F4A7C15)
    for column in range(4):
        state_ = state_ + np.uint64(0xD1342543DE82EF95)
        mixed_ = (state_ ^ (state_ >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_ = (mixed_ ^ (mixed_ >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word_[:, column] = mixed_ ^ (mixed_ >> np.uint64(31))
    return word_.view(np.uint8).reshape(-1, DIGEST_BYTES)


def make(root: RunRoot, documents: int) -> dict[str, int]:
    """Write the files; returns how many documents of each source are shadowed, by counting different numbers."""
    count, draw = documents // FILES, np.random.default_rng(4)
    first_of = {"wikipedia": 0, "fineweb_edu": FILES // 4 * count}
    number_ = np.arange(FILES * count, dtype=np.uint64)
    for file in range(FILES):
        start = file * count
        source = MEMBERS[start >= first_of["fineweb_edu"]]
        here_, kind_ = number_[start : start + count], draw.random(count)
        places = [(kind_ < WITHIN, first_of[source], start)]
        places += [(kind_ > 1 - ACROSS, 0, first_of["fineweb_edu"])] if source == "fineweb_edu" else []
        for chosen_, low, high in places:
            if high > low:
                here_[chosen_] = draw.integers(low, high, int(chosen_.sum()), dtype=np.uint64)
        target = root.digests(source, f"{file:05d}")
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, digests_of(here_))
    first = first_of["fineweb_edu"]
    in_first, in_all = len(np.unique(number_[:first])), len(np.unique(number_))
    return {"wikipedia": first - in_first, "fineweb_edu": len(number_) - first - (in_all - in_first)}


def status_mb(field: str) -> float:
    """A size of this process: `VmRSS` now, `VmHWM` at the most."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field + ":")) / 1e6


def decide_and_measure(root: RunRoot) -> dict[str, float | int]:
    """What the child does."""
    places = [(source, path.stem) for source in MEMBERS for path in sorted(root.digests(source, "").parent.iterdir())]
    before_mb, began, began_cpu = status_mb("VmRSS"), time.monotonic(), time.process_time()
    _, report = decide(root, GROUP, places)
    found: dict[str, float | int] = {
        "extra_mb": round(status_mb("VmHWM") - before_mb, 1),
        "cpu_s": round(time.process_time() - began_cpu, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }
    return found | {source: report[source]["shadowed"] for source in MEMBERS}


def measure(documents: int, folder: Path | None) -> dict[str, float | int]:
    """Make the digests, decide in a child, and compare the counts."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="dedup-") as place:
        copies = make(RunRoot(Path(place)), documents)
        command = [sys.executable, "-m", "bench.dedup", "--child", place]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float | int] = json.loads(done.stdout)
    for source in MEMBERS:
        if found.pop(source) != copies[source]:
            raise SystemExit(f"{source}: {copies[source]:,} are shadowed, another number was found")
    return found | {"documents": documents, "copies": sum(copies.values())}


def main() -> None:
    """Measure 20 and 50 million; exit 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs=2, default=(20.0, 50.0), help="digests, small and large")
    parser.add_argument("--folder", type=Path, help="where the digests are made; the temporary folder by default")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(decide_and_measure(RunRoot(options.child))))
        return
    small, large = (measure(int(millions * 1e6), options.folder) for millions in options.millions)
    for found in (small, large):
        print(found, flush=True)
    result = {"benchmark": "dedup", "extra_mb_20m": small["extra_mb"], "cpu_s_20m": small["cpu_s"]}
    result |= {"extra_mb_50m": large["extra_mb"], "cpu_s_50m": large["cpu_s"], "documents": small["documents"]}
    result |= {"share_copied_within": WITHIN, "share_copied_across": ACROSS}
    result["passed"] = max(small["extra_mb"], large["extra_mb"]) < LIMIT_MB and small["cpu_s"] < LIMIT_CPU_S
    print(json.dumps(result))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
