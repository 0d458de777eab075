"""The verdict on a chaos campaign sees each thing that must not be, in files that are made here."""

import json
from pathlib import Path

import pytest
import torch

from bench.chaos_verdict import verdict
from model.files import sha256_file

GOOD = {"faults": 2, "doubled": 0, "lost_steps_on_warning": 0, "unreported_loss": 0, "finished": True}
JOB = (
    "JobId={} UserId=me(1) GroupId=me(1) Name=dg-{:08d}-1 JobState={} StartTime=2026-01-01T{} EndTime=2026-01-01T{} \n"
)


def record(
    submission: int, attempt: int, steps: tuple[int, int, int], code: int | None, times: tuple[str, str]
) -> dict:
    begun, went, saved = steps
    reason = {None: "killed", 75: "stop_file", 0: "finished"}[code]
    started, ended = (f"2026-01-01T{time}+00:00" for time in times)
    found = {"submission": submission, "attempt": attempt, "from_step": begun, "to_step": went, "saved_step": saved}
    found |= {"lost_steps": went - saved, "exit_code": code, "stop_reason": reason, "job_id": str(submission + attempt)}
    return found | {"started": started, "ended": None if code is None else ended}


class Campaign:
    """Three jobs: one killed at step 9 with 6 saved, one cut and saved at 12, one that finished."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.uncut = folder, folder / "run", folder / "uncut"
        for run in (self.run, self.uncut):
            self.save(run, "final", 20)
        self.save(self.run, "step_12", 12)
        self.ledger = [
            record(1, 1, (0, 9, 6), None, ("10:00:02", "")),
            record(1, 2, (6, 12, 12), 75, ("10:02:02", "10:03:00")),
            record(2, 2, (12, 20, 20), 0, ("10:04:02", "10:05:00")),
        ]
        self.jobs = [
            JOB.format(2, 1, "FAILED", "10:00:00", "10:01:00"),
            JOB.format(3, 2, "COMPLETED", "10:02:00", "10:03:02"),
            JOB.format(9, 3, "CANCELLED", "10:02:30", "10:02:30"),
            JOB.format(4, 4, "COMPLETED", "10:04:00", "10:05:02"),
        ]

    def save(self, run: Path, name: str, step: int, job: str = "3", weight: float = 1.0) -> None:
        path = run / "checkpoints" / f"{name}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "loss_history": [1.0] * step, "model_state_dict": {"w": torch.tensor([weight])}}
        torch.save(state, path)
        facts = {"step": step, "bytes": path.stat().st_size, "sha256": sha256_file(path), "job_id": job}
        path.with_suffix(".json").write_text(json.dumps(facts))

    def verdict(self) -> dict:
        (self.run / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in self.ledger))
        (self.folder / "jobs").write_text("".join(self.jobs))
        (self.folder / "faults").write_text('{"kind": "daemon"}\n{"kind": "trainer"}\n')
        return verdict(self.run, self.uncut, self.folder / "jobs", self.folder / "faults")[0]


@pytest.fixture
def campaign(tmp_path) -> Campaign:
    return Campaign(tmp_path)


def test_verdict_on_a_campaign_that_went_well_finds_nothing(campaign):
    assert campaign.verdict() == GOOD


def test_verdict_on_jobs_that_ran_at_once_counts_them(campaign):
    campaign.jobs[3] = JOB.format(4, 4, "COMPLETED", "10:03:01", "10:05:02")
    assert campaign.verdict()["doubled"] == 1


def test_verdict_on_trainers_that_ran_at_once_or_under_one_number_counts_them(campaign):
    campaign.ledger[2]["started"] = "2026-01-01T10:02:59+00:00"
    assert campaign.verdict()["doubled"] == 1
    campaign.ledger[2] |= {"started": "2026-01-01T10:04:02+00:00", "submission": 1}
    assert campaign.verdict()["doubled"] == 1


def test_verdict_on_a_trainer_that_was_warned_and_lost_steps_says_how_many(campaign):
    campaign.ledger[1] |= {"to_step": 15, "lost_steps": 3}
    assert campaign.verdict()["lost_steps_on_warning"] == 3


@pytest.mark.parametrize("change", [{"from_step": 9}, {"lost_steps": 0, "to_step": 15}])
def test_verdict_on_a_loss_that_no_record_tells_of_counts_it(campaign, change):
    campaign.ledger[1] |= change
    assert campaign.verdict()["unreported_loss"] == 1


def test_verdict_on_a_checkpoint_of_a_job_without_a_record_counts_it(campaign):
    campaign.save(campaign.run, "step_12", 12, job="77")
    assert campaign.verdict()["unreported_loss"] == 1


def test_verdict_on_a_run_that_did_not_end_as_the_uncut_one_says_so(campaign):
    campaign.save(campaign.run, "final", 20, weight=1.5)
    assert campaign.verdict()["finished"] is False
    campaign.save(campaign.run, "final", 20)
    assert campaign.verdict()["finished"] is True
    (campaign.run / "checkpoints" / "final.pt").unlink()
    assert campaign.verdict()["finished"] is False
