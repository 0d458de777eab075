"""Checks a finished run root from its files alone, with nothing of the project imported.

`python tests/check_run_root.py var/demo` exits 0 when every claim holds, else 1 and says which not.
"""

import hashlib
import json
import math
import sys
import tomllib
from pathlib import Path

SOURCES = ["fineweb_edu", "wikipedia", "openwebmath", "stackexchange", "pes2o", "textbooks"]
START_TOLERANCE_NATS = 0.05
LEAST_FALL_NATS = 2.0


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_corpus(root, problems):
    manifest = json.loads((root / "manifest.json").read_text())
    for key in ("format_version", "tokenizer", "settings_sha256", "lock_sha256", "sources", "shards", "heldout"):
        if key not in manifest:
            problems.append(f"manifest.json lacks {key}")
    if list(manifest["sources"]) != SOURCES:
        problems.append(f"manifest.json has the sources {list(manifest['sources'])}")
    listed = set()
    for shard in [*manifest["shards"], *manifest["heldout"]]:
        path = root / shard["path"]
        listed.add(path.resolve())
        if path.stat().st_size != 4 * shard["tokens"]:
            problems.append(f"{shard['path']}: {path.stat().st_size} bytes for {shard['tokens']} tokens")
        if sha256(path) != shard["sha256"]:
            problems.append(f"{shard['path']}: SHA-256 is not the manifest's")
        sidecar = json.loads(path.with_suffix(".json").read_text())
        if (sidecar["tokens"], sidecar["sha256"]) != (shard["tokens"], shard["sha256"]):
            problems.append(f"{shard['path']}: its sidecar disagrees with the manifest")
        if not path.with_suffix(".docs.parquet").exists():
            problems.append(f"{shard['path']}: no document table")
    on_disk = {path.resolve() for path in (root / "tokens").rglob("*.bin")}
    if on_disk != listed:
        problems.append(f"shards on disk and in the manifest differ: {on_disk ^ listed}")
    for source in SOURCES:
        facts = manifest["sources"][source]
        if facts["documents"] <= 0 or facts["tokens"] <= 0:
            problems.append(f"{source}: nothing in the corpus")
        if sum(facts["funnel"].values()) <= 0:
            problems.append(f"{source}: an empty funnel")
    return manifest


def check_training(root, problems):
    (folder,) = (root / "experiments").iterdir()
    metrics = jsonl(folder / "metrics.jsonl")
    losses = {point["step"]: point["loss"] for point in metrics if point["kind"] == "train"}
    ledger = jsonl(folder / "ledger.jsonl")
    last = max(losses)
    if ledger[-1]["stop_reason"] != "finished" or ledger[-1]["exit_code"] != 0:
        problems.append(f"the last submission ended with {ledger[-1]['stop_reason']}")
    if [record["stop_reason"] for record in ledger] != ["deadline", "finished"]:
        problems.append(f"stop reasons are {[record['stop_reason'] for record in ledger]}, not deadline and finished")
    position = 0
    for record in ledger:
        if record["from_step"] != position or record["saved_step"] <= position:
            problems.append(f"submission {record['submission']} went from {record['from_step']}, expected {position}")
        position = record["saved_step"]
    taken = sorted(point["step"] for point in metrics if point["kind"] == "train")
    if position != last or taken != list(range(1, last + 1)):
        problems.append(f"not every step of 1..{last} was taken exactly once")
    shape = tomllib.loads((folder / "config.toml").read_text())["model"]
    predicted = math.log(shape["vocab_size"]) + (0.02**2 * shape["d_model"]) / 2
    if abs(losses[1] - predicted) > START_TOLERANCE_NATS:
        problems.append(f"the loss starts at {losses[1]:.3f}, the initialisation predicts {predicted:.3f}")
    tail = [losses[step] for step in range(last - 4, last + 1)]
    if losses[1] - sum(tail) / len(tail) < LEAST_FALL_NATS:
        problems.append(f"the loss fell only from {losses[1]:.3f} to {sum(tail) / len(tail):.3f}")
    checkpoints = sorted((folder / "checkpoints").glob("*.pt"))
    if "final.pt" not in [checkpoint.name for checkpoint in checkpoints]:
        problems.append("there is no final.pt")
    for checkpoint in checkpoints:
        sidecar = json.loads(checkpoint.with_suffix(".json").read_text())
        if (checkpoint.stat().st_size, sha256(checkpoint)) != (sidecar["bytes"], sidecar["sha256"]):
            problems.append(f"{checkpoint.name}: size or SHA-256 is not its sidecar's")
    heldout = [point for point in metrics if point["kind"] == "heldout" and point["step"] == last]
    if {point["source"] for point in heldout} != {*SOURCES, "all"}:
        problems.append(f"held-out figures at the end only for {[point['source'] for point in heldout]}")
    if not all(0 < point["bits_per_byte"] < 10 for point in heldout):
        problems.append("bits per byte out of any sensible range")
    samples = {sample["step"] for sample in jsonl(folder / "samples.jsonl")}
    if not {0, last} <= samples:
        problems.append(f"samples only at steps {sorted(samples)}")
    if (folder / "LOCK").exists():
        problems.append("the run's LOCK is still there")
    return folder.name


def check_results(root, name, problems):
    for path in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        if not (root / "exports" / name / path).exists():
            problems.append(f"exports/{name}/{path} is missing")
    scores = json.loads((root / "evaluations" / name / "scores.json").read_text())
    cloze = scores["tasks"]["heldout_cloze"]
    if not (0 <= cloze["acc"] <= 1 and cloze["acc_stderr"] > 0 and 0 < cloze["chance"] < 1 and cloze["n"] > 0):
        problems.append(f"implausible scores: {cloze}")
    evidence = root / "evidence" / name
    if "<svg" not in (evidence / "index.html").read_text():
        problems.append("the report has no chart")
    json.loads((evidence / "evidence.json").read_text())
    if len((evidence / "loss.csv").read_text().splitlines()) < 2:
        problems.append("loss.csv is empty")


def check(root):
    problems = []
    for path in (
        "sources.lock.json",
        "raw",
        "filtered",
        "digests",
        "survivors",
        "tokens/heldout",
        "manifest.json",
        "dagster",
    ):
        if not (root / path).exists():
            problems.append(f"{path} is missing")
    leftovers = list(root.rglob(".*.tmp"))
    if leftovers:
        problems.append(f"leftovers of unfinished writes: {leftovers}")
    check_corpus(root, problems)
    check_results(root, check_training(root, problems), problems)
    return problems


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]}: every claim holds")
    sys.exit(bool(found))
