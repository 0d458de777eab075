"""A SLURM that answers from a dictionary, and programs that answer from files: for tests of whoever asks it."""

import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rqwen3_pipeline.slurm.client import Slurm
from rqwen3_pipeline.slurm.options import JobOptions
from rqwen3_pipeline.slurm.parsing import Job
from rqwen3_pipeline.slurm.states import State


def job(job_id: int, state: State, **more: Any) -> Job:
    values = {"name": "dg-x-1", "state_text": state.value, "comment": "", **more}
    return Job(job_id=job_id, state=state, **values)


class FakeSlurm(Slurm):
    """Jobs in a dictionary; `failing` holds the errors that the next commands raise."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[int, Job] = {}
        self.accounts: dict[int, Job] = {}
        self.failing: list[Exception] = []
        self.submitted: list[tuple[JobOptions, str]] = []
        self.cancelled: list[int] = []
        self.commands: list[str] = []
        self.accepts_though_it_fails = False

    def _command(self, name: str) -> None:
        self.commands.append(name)
        if self.failing:
            raise self.failing.pop(0)

    def submit(self, options: JobOptions, script: str) -> int:
        accepted = 100 + len(self.submitted)
        if self.accepts_though_it_fails or not self.failing:
            self.submitted.append((options, script))
            self.listed[accepted] = job(accepted, State.PENDING, name=options.job_name, comment=options.comment)
        self._command("sbatch")
        return accepted

    def jobs(self, *, fresh: bool = False) -> dict[int, Job]:
        self._command("squeue")
        return dict(self.listed)

    def job(self, job_id: int) -> Job | None:
        self._command("scontrol")
        return self.listed.get(job_id)

    def find(self, name: str) -> list[Job]:
        self._command("squeue")
        return sorted((j for j in self.listed.values() if j.name == name), key=lambda j: -j.job_id)

    def accounted(self, job_ids: Sequence[int]) -> dict[int, Job]:
        return self._accounts(lambda job: job.job_id in job_ids) if job_ids else {}

    def accounted_by_name(self, names: Sequence[str]) -> dict[int, Job]:
        return self._accounts(lambda job: job.name in names) if names else {}

    def _accounts(self, wanted: Callable[[Job], bool]) -> dict[int, Job]:
        self._command("sacct")
        return {job_id: job for job_id, job in self.accounts.items() if wanted(job)}

    def cancel(self, *job_ids: int, signal: str | None = None, batch: bool = False) -> None:
        self._command("scancel")
        self.cancelled += job_ids


def programs(folder: Path, **answers: dict[str, Any]) -> Path:
    """Programs in `folder` that note how they were called in calls.jsonl, and answer as told.

    An answer has `out`, `err`, `rc`, and `sleep` in seconds.
    """
    folder.mkdir(exist_ok=True)
    for name, answer in answers.items():
        lines = [
            "#!/usr/bin/env python3",
            "import json, os, sys, time",
            f"answer = json.loads({json.dumps(json.dumps(answer))})",
            f"call = dict(name={name!r}, argv=sys.argv[1:], env=dict(os.environ))",
            f"call['stdin'] = sys.stdin.read() if {name!r} == 'sbatch' else ''",
            f"open({str(folder / 'calls.jsonl')!r}, 'a').write(json.dumps(call) + chr(10))",
            "time.sleep(answer.get('sleep', 0))",
            "sys.stdout.write(answer.get('out', '')); sys.stderr.write(answer.get('err', ''))",
            "sys.exit(answer.get('rc', 0))",
        ]
        program = folder / name
        program.write_text("\n".join(lines))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return folder


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
