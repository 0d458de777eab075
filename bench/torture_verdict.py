"""The verdict on a torture campaign, from the files that it left, by none of the code that it judges.

    python bench/torture_verdict.py FOLDER            the verdict on a whole campaign, one JSON object
    python bench/torture_verdict.py FOLDER --watch    reads names of runs, one a line, and looks at each

What was read is known from the trainer's phase file, which names each micro-batch's windows by
fingerprint; the windows themselves are cut here from the shards. A step counts as it was last done.
Imports torch, numpy and the standard library only. Costs a hash of every checkpoint per look.
"""

import argparse
import hashlib
import json
import math
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

KEYS = {"step", "model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "loss_history", "data_offset"}
WARNINGS = {"SIGTERM", "SIGUSR1", "SIGINT"}
EXPECTED = re.compile(
    r"LOCK|config\.toml|(metrics|samples|weights|ledger|dry_steps)\.jsonl|checkpoints(/(step_\d+|final)\.(pt|json))?"
    r"|environments(/\d+-a\d+\.json)?"
)


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file; torn lines are passed over."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if isinstance(record, dict)]


def look(run: Path) -> dict[str, Any]:
    """The checkpoints of a run as they lie there: which are committed, and what is wrong with which."""
    good, wrong = [], []
    for sidecar in sorted((run / "checkpoints").glob("*.json")):
        file = sidecar.with_suffix(".pt")
        if not file.exists():
            continue  # a sidecar goes before its file when either is removed or replaced
        try:
            said = json.loads(sidecar.read_text())
            data = file.read_bytes()
            if (len(data), hashlib.sha256(data).hexdigest()) != (said["bytes"], said["sha256"]):
                raise ValueError("size or hash differ from the sidecar's")
            state = torch.load(file, weights_only=True)
            if set(state) != KEYS or state["step"] != said["step"] or len(state["loss_history"]) != state["step"]:
                raise ValueError(f"holds {sorted(state)} at step {state.get('step')}")
            if not all(bool(torch.isfinite(tensor).all()) for tensor in state["model_state_dict"].values()):
                raise ValueError("its weights are not finite")
            good.append(said["step"])
        except Exception as error:
            wrong.append(f"{file.name}: {error}")
    return {"run": run.name, "newest": max(good, default=0), "wrong": wrong}


def windows_of(manifest_path: Path, seq_len: int) -> list[str]:
    """Fingerprints of all windows: seq_len + 1 tokens, seq_len apart, over each source's shards as one stream."""
    manifest = json.loads(manifest_path.read_text())
    streams: dict[str, list[np.ndarray]] = {}
    for shard in manifest["shards"]:
        tokens_ = np.fromfile(manifest_path.parent / shard["path"], dtype="<u4")[: shard["tokens_used"]]
        streams.setdefault(shard["source"], []).append(tokens_)
    found = []
    for parts in streams.values():
        stream_ = np.concatenate(parts)
        starts = range(0, len(stream_) - seq_len, seq_len)
        found += [hashlib.sha256(stream_[s : s + seq_len + 1].tobytes()).hexdigest()[:16] for s in starts]
    if len(set(found)) != len(found):
        raise SystemExit("the corpus has equal windows; what was read can't be told apart")
    return found


def windows_read(journal: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The windows of each step, as it was last done."""
    done: dict[int, list[str]] = {}
    begun: dict[int, list[str]] = {}
    process = None
    for line in journal:
        if line["pid"] != process:
            process, begun = line["pid"], {}
        if line["within"] is not None:
            continue
        if line["phase"] in ("micro_batch", "compile"):
            begun.setdefault(line["step"], []).extend(line["windows"])
        elif line["phase"] == "step_done":
            done[line["step"]] = begun.pop(line["step"])
    return done


def steps_lost_on_warning(journal: list[dict[str, Any]], kills: list[dict[str, Any]]) -> int:
    """The most steps that a warned process had done and the next one to train did not have."""
    warned = {kill["pid"] for kill in kills if set(kill["signals"]) <= WARNINGS}
    order = list(dict.fromkeys(line["pid"] for line in journal))
    real = [line for line in journal if line["within"] is None]
    last = {line["pid"]: line["step"] for line in real if line["phase"] == "step_done"}
    first: dict[int, int] = {}
    for line in real:
        if line["phase"] in ("micro_batch", "compile"):
            first.setdefault(line["pid"], line["step"])
    lost = 0
    for place, pid in enumerate(order):
        following = [first[later] for later in order[place + 1 :] if later in first]
        if pid in warned and pid in last and following:
            lost = max(lost, last[pid] - (following[0] - 1))
    return lost


def rate(step: int, training: dict[str, Any]) -> float:
    """Linear warm-up, then the cosine."""
    peak, least, warm = training["learning_rate"], training["min_learning_rate"], training["warmup_steps"]
    if step <= warm:
        return peak * step / warm
    share = (1 + math.cos(math.pi * (step - warm) / (training["max_steps"] - warm))) / 2
    return least + share * (peak - least)


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Where two states differ, bit by bit."""
    if isinstance(left, torch.Tensor):
        return [] if isinstance(right, torch.Tensor) and torch.equal(left, right) else [where]
    if isinstance(left, dict) and isinstance(right, dict) and list(left) == list(right):
        return [found for key in left for found in differences(left[key], right[key], f"{where}/{key}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [found for i, (one, other) in pairs for found in differences(one, other, f"{where}/{i}")]
    return [] if left == right else [where]


def judge_run(run: Path, straight: Path) -> list[str]:
    """What of a finished run differs from the straight one, or should not be there."""
    problems = []
    if not (run / "checkpoints/final.json").exists():
        return [f"{run.name}: did not finish"]
    ends = [torch.load(folder / "checkpoints/final.pt", weights_only=True) for folder in (run, straight)]
    problems += [f"differs: {where}" for where in differences(ends[0], ends[1])[:5]]
    training = tomllib.loads((run / "config.toml").read_text())["training"]
    trained = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    losses = {record["step"]: record["loss"] for record in trained}
    if [losses.get(step) for step in range(1, training["max_steps"] + 1)] != ends[1]["loss_history"]:
        problems.append("the losses in metrics.jsonl are not those of the straight run")
    wrong = [r["step"] for r in trained if abs(r["learning_rate"] - rate(r["step"], training)) > 1e-15]
    problems += [f"another learning rate than the formula's at steps {wrong[:5]}"] if wrong else []
    if trained[-1]["learning_rate"] != training["min_learning_rate"]:
        problems.append("the learning rate does not end at its minimum")
    names = [str(path.relative_to(run)) for path in run.rglob("*")]
    stray = [name for name in names if name == "LOCK" or not EXPECTED.fullmatch(name)]
    problems += [f"left over: {', '.join(stray)}"] if stray else []
    uncommitted = [path.name for path in run.glob("checkpoints/*.pt") if not path.with_suffix(".json").exists()]
    problems += [f"left over: {', '.join(uncommitted)}"] if uncommitted else []
    return [f"{run.name}: {problem}" for problem in problems]


def verdict(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures, and all that is wrong in words."""
    kills, states = lines(folder / "kills.jsonl"), lines(folder / "states.jsonl")
    problems: list[str] = []
    missed = repeated = lost = 0
    equal = True
    for run in sorted(folder.glob("round-*/")):
        straight = folder / ("straight-compiled" if run.name.endswith("compiled") else "straight")
        found = judge_run(run, straight)
        equal &= not any("differs" in problem or "losses" in problem or "finish" in problem for problem in found)
        problems += found
        journal = lines(folder / f"{run.name}.phases")
        seq_len = tomllib.loads((run / "config.toml").read_text())["training"]["seq_len"]
        counted = Counter(name for names in windows_read(journal).values() for name in names)
        wanted = windows_of(folder / "corpus/manifest.json", seq_len)
        missed += sum(counted[name] == 0 for name in wanted)
        repeated += sum(count - 1 for count in counted.values())
        problems += [f"{run.name}: read a window that is not in the corpus"] if set(counted) - set(wanted) else []
        of_run = [kill for kill in kills if kill["run"] == run.name]
        lost = max(lost, steps_lost_on_warning(journal, of_run))
        spoke = {line["pid"] for line in journal}
        for kill in of_run:  # before its first line the handlers may not be there yet, and nothing was begun
            if set(kill["signals"]) <= WARNINGS and kill["pid"] in spoke and kill["exit_code"] not in (75, 0):
                problems.append(f"{run.name}: exit code {kill['exit_code']} after {kill['signals']} in {kill['phase']}")
    unloadable = sum(len(state["wrong"]) for state in states)
    newest: dict[str, int] = {}
    for state in states:  # what could be resumed from once, can be ever after
        unloadable += state["newest"] < newest.get(state["run"], 0)
        newest[state["run"]] = state["newest"]
    problems += [f"{state['run']}: {wrong}" for state in states for wrong in state["wrong"]]
    figures = {
        "kills": len(kills),
        "kills_by_phase": dict(sorted(Counter(kill["phase"] for kill in kills).items())),
        "bitwise_equal": equal and bool(kills),
        "windows_missed": missed,
        "windows_repeated": repeated,
        "unloadable": unloadable,
        "max_steps_lost_on_warning": lost,
    }
    return figures, problems


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Judge a torture campaign from its files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--watch", action="store_true", help="look at the run named on each line of the input")
    options = parser.parse_args()
    if options.watch:
        for name in sys.stdin:
            state = look(options.folder / name.strip())
            with (options.folder / "states.jsonl").open("a") as file:
                file.write(json.dumps(state) + "\n")
            print(json.dumps(state), flush=True)
        return 0
    figures, problems = verdict(options.folder)
    for problem in problems:
        print(problem)
    print(json.dumps(figures))
    nothing = ("windows_missed", "windows_repeated", "unloadable")
    clean = figures["bitwise_equal"] and not problems and not any(figures[key] for key in nothing)
    return 0 if clean and figures["max_steps_lost_on_warning"] <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
