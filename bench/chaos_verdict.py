"""The verdict on a chaos campaign, from ledger, checkpoints and SLURM's job log, by none of the code that it judges.

    python bench/chaos_verdict.py EXPERIMENT UNCUT JOB_LOG FAULTS

EXPERIMENT is the run's folder, UNCUT that of the same run in one go, JOB_LOG what jobcomp/filetxt wrote,
FAULTS a file with one line a fault, which are only counted. Imports torch and the standard library only.
The last line is one JSON object; what is wrong comes before it, a line each.
"""

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

SAID_GOODBYE = (0, 75)
"""Exit codes of a trainer that was warned in time: finished, or saved."""


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file; torn lines are passed over."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if isinstance(record, dict)]


def jobs(log: Path) -> list[dict[str, str]]:
    """The submissions' jobs that ran, by their start; a job that was cancelled while it waited has no length."""
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in log.read_text(errors="replace").splitlines()]
    ran = [job for job in found if job["Name"].startswith("dg-") and job["StartTime"] < job["EndTime"]]
    return sorted(ran, key=lambda job: job["StartTime"])


def doubled(ledger: list[dict[str, Any]], log: list[dict[str, str]]) -> list[str]:
    """Submissions that ran beside one another, by SLURM's clock and by the trainers' own, or twice."""
    wrong = [
        f"jobs {a['JobId']} and {b['JobId']} ran at once: until {a['EndTime']}, from {b['StartTime']}"
        for a, b in itertools.pairwise(log)
        if b["StartTime"] < a["EndTime"]
    ]
    counted = Counter((record["submission"], record["attempt"]) for record in ledger)
    wrong += [f"submission {key} is {count} times in the ledger" for key, count in counted.items() if count > 1]
    begun = sorted((r for r in ledger if r.get("started")), key=lambda r: datetime.fromisoformat(r["started"]))
    for a, b in itertools.pairwise(begun):
        if a.get("ended") and datetime.fromisoformat(b["started"]) < datetime.fromisoformat(a["ended"]):
            wrong.append(f"submissions {a['submission']} and {b['submission']} trained at once")
    return wrong


def loss_on_warning(ledger: list[dict[str, Any]]) -> int:
    """The most steps that a trainer lost which had time to save."""
    spoke = [record for record in ledger if record["exit_code"] in SAID_GOODBYE]
    return max((max(r["lost_steps"], r["to_step"] - r["saved_step"]) for r in spoke), default=0)


def unreported(ledger: list[dict[str, Any]], run: Path) -> list[str]:
    """Losses of which no record tells: a submission that began elsewhere than the last one said it saved."""
    wrong: list[str] = []
    reached = 0
    for record in ledger:
        name = f"submission {record['submission']}.{record['attempt']}"
        if record["from_step"] is None:
            continue
        if record["from_step"] != reached:
            wrong.append(f"{name} began at step {record['from_step']}, the one before had saved {reached}")
        if record["lost_steps"] != record["to_step"] - record["saved_step"]:
            wrong.append(
                f"{name} went to {record['to_step']}, saved {record['saved_step']}, lost {record['lost_steps']}"
            )
        reached = record["saved_step"]
    named = {record["job_id"] for record in ledger}
    for sidecar in sorted((run / "checkpoints").glob("*.json")):
        job = json.loads(sidecar.read_text()).get("job_id")
        if job is not None and job not in named:
            wrong.append(f"{sidecar.name} was saved by job {job}, of which no record tells")
    return wrong


def unfinished(run: Path, uncut: Path, ledger: list[dict[str, Any]], log: list[dict[str, str]]) -> list[str]:
    """Why the run did not end as the uncut one."""
    final = run / "checkpoints" / "final.pt"
    if not final.exists():
        return ["there is no final.pt"]
    wrong: list[str] = []
    said, data = json.loads(final.with_suffix(".json").read_text()), final.read_bytes()
    if (len(data), hashlib.sha256(data).hexdigest()) != (said["bytes"], said["sha256"]):
        wrong.append("final.pt is not what its sidecar says")
    ours = torch.load(final, weights_only=True)
    theirs = torch.load(uncut / "checkpoints" / "final.pt", weights_only=True)
    if ours["step"] != theirs["step"] or ours["loss_history"] != theirs["loss_history"]:
        wrong.append("steps or losses differ from the uncut run's")
    for name, tensor in theirs["model_state_dict"].items():
        if not torch.equal(ours["model_state_dict"][name], tensor):
            wrong.append(f"{name} differs from the uncut run's")
    if (ledger[-1]["stop_reason"], ledger[-1]["exit_code"]) != ("finished", 0):
        wrong.append(f"the ledger ends with {ledger[-1]['stop_reason']}, exit code {ledger[-1]['exit_code']}")
    if ledger[-1]["job_id"] not in {job["JobId"] for job in log}:
        wrong.append(f"SLURM has no job {ledger[-1]['job_id']}, which finished the run")
    return wrong


def verdict(experiment: Path, uncut: Path, job_log: Path, faults: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what is wrong, a line each."""
    ledger, log = lines(experiment / "ledger.jsonl"), jobs(job_log)
    twice, silent = doubled(ledger, log), unreported(ledger, experiment)
    open_ends = unfinished(experiment, uncut, ledger, log)
    figures = {
        "faults": len(lines(faults)),
        "doubled": len(twice),
        "lost_steps_on_warning": loss_on_warning(ledger),
        "unreported_loss": len(silent),
        "finished": not open_ends,
    }
    return figures, [*twice, *silent, *open_ends]


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Judge a chaos campaign from its files.")
    for name in ("experiment", "uncut", "job_log", "faults"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    figures, problems = verdict(options.experiment, options.uncut, options.job_log, options.faults)
    for problem in problems:
        print(problem)
    print(json.dumps(figures))
    return 1 if problems or figures["lost_steps_on_warning"] else 0


if __name__ == "__main__":
    sys.exit(main())
