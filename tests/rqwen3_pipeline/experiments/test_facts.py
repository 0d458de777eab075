"""Attempts from what a ledger, a lock, runs and jobs say, each alone and together."""

import json
import os
import socket
from pathlib import Path

import pytest

from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.experiments.facts import RunSeen, attempts_of, next_attempt, telling_line
from rqwen3_pipeline.experiments.policy import Action, Facts, Outcome, Policy, decide
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.slurm.states import State

NAME = "e"


@pytest.fixture
def root(tmp_path: Path) -> RunRoot:
    root = RunRoot(tmp_path)
    (root.experiment(NAME) / "checkpoints").mkdir(parents=True)
    return root


def write_lines(path: Path, *records: dict) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def ledger_record(root: RunRoot, submission=1, attempt=1, code: int | None = 75, reason="deadline", **more) -> None:
    values = {"from_step": 0, "to_step": 9, "saved_step": 9, "ended": "2026-01-01T00:00:00+00:00", "error": None}
    record = {"submission": submission, "attempt": attempt, "exit_code": code, "stop_reason": reason, **values, **more}
    write_lines(root.experiment(NAME) / "ledger.jsonl", record)


def dead_lock(root: RunRoot, **more) -> None:
    holder = {"submission": 1, "attempt": 1, "from_step": 3, "pid": 2**22 + 7, "host": socket.gethostname(), **more}
    (root.experiment(NAME) / "LOCK").write_text(json.dumps(holder), encoding="utf-8")


def saved(root: RunRoot, step: int) -> None:
    path = root.experiment(NAME) / "checkpoints" / f"step_{step}.pt"
    path.write_bytes(b"x")
    path.with_suffix(".json").write_text(json.dumps({"bytes": 1, "sha256": "0" * 64, "step": step}), encoding="utf-8")


def run_seen(submission=1, attempt=1, **more) -> RunSeen:
    return RunSeen(run_id="r", submission=submission, attempt=attempt, **{"live": False, **more})


@pytest.mark.parametrize(
    ("code", "reason", "run", "outcome"),
    [
        (75, "deadline", {}, Outcome.SAVED),
        (75, "SIGTERM", {"state": State.TIMEOUT}, Outcome.SAVED),
        (75, "SIGTERM", {"state": State.PREEMPTED}, Outcome.SAVED),
        (75, "SIGTERM", {"state": State.CANCELLED}, Outcome.CANCELLED),
        (75, "stop_file", {"cancelled": True}, Outcome.CANCELLED),
        (0, "finished", {"state": State.FAILED}, Outcome.FINISHED),
        (0, "finished", {"cancelled": True}, Outcome.FINISHED),
        (1, "out_of_memory", {"state": State.FAILED}, Outcome.OUT_OF_MEMORY),
        (1, "disk_full", {}, Outcome.DISK_FULL),
        (1, "non_finite", {}, Outcome.NOT_FINITE),
        (1, "error", {"state": State.COMPLETED}, Outcome.ERROR),
        (None, "killed", {"state": State.OUT_OF_MEMORY}, Outcome.OUT_OF_MEMORY),
        (None, "killed", {"state": State.TIMEOUT}, Outcome.TIMED_OUT),
        (None, "killed", {"state": State.NODE_FAIL}, Outcome.LOST),
        (None, "killed", {"state": State.FAILED}, Outcome.LOST),
        (None, "killed", {"state": State.FAILED, "memory_kill": "exceeded memory limit"}, Outcome.OUT_OF_MEMORY),
        (None, "killed", {"state": State.NODE_FAIL, "memory_kill": "exceeded memory limit"}, Outcome.LOST),
        (1, "error", {"state": State.FAILED, "memory_kill": "exceeded memory limit"}, Outcome.ERROR),
        (None, "killed", {}, Outcome.LOST),
    ],
)
def test_attempt_with_a_ledger_record_ended_as_record_run_and_job_say_together(root, code, reason, run, outcome):
    ledger_record(root, code=code, reason=reason)
    (attempt,) = attempts_of(root, NAME, [run_seen(**run)])
    assert attempt.outcome is outcome
    assert attempt.saved_step == 9


@pytest.mark.parametrize(
    ("lock", "run", "outcome"),
    [
        (False, {"detail": "no module named torch"}, Outcome.ERROR),
        (False, {"state": State.FAILED}, Outcome.ERROR),
        (False, {"state": State.COMPLETED}, Outcome.ERROR),
        (False, {"state": State.BOOT_FAIL}, Outcome.LOST),
        (False, {"cannot_start": True, "state": State.PENDING}, Outcome.CANNOT_START),
        (False, {"cannot_start": True, "state": State.CANCELLED}, Outcome.CANNOT_START),
        (False, {"cancelled": True}, Outcome.CANCELLED),
        (False, {"exit_code": 73}, Outcome.LOST),
        (False, {"exit_code": -9, "state": State.FAILED}, Outcome.LOST),
        (False, {"exit_code": 137, "state": State.FAILED}, Outcome.LOST),
        (False, {"exit_code": 74, "state": State.FAILED}, Outcome.DISK_FULL),
        (False, {"exit_code": 71}, Outcome.OUT_OF_MEMORY),
        (False, {"exit_code": 65}, Outcome.NOT_FINITE),
        (True, {"exit_code": 74, "state": State.FAILED}, Outcome.DISK_FULL),
        (False, {"vanished": True, "state": State.UNKNOWN}, Outcome.LOST),
        (False, {"exit_code": -11}, Outcome.ERROR),
        (True, {"exit_code": -9}, Outcome.LOST),
        (True, {"exit_code": -9, "state": State.FAILED, "memory_kill": "exceeded"}, Outcome.OUT_OF_MEMORY),
        (True, {"state": State.OUT_OF_MEMORY}, Outcome.OUT_OF_MEMORY),
        (True, {"state": State.TIMEOUT}, Outcome.TIMED_OUT),
    ],
)
def test_attempt_without_a_ledger_record_is_judged_by_its_lock_and_its_job(root, lock, run, outcome):
    if lock:
        dead_lock(root)
        saved(root, 7)
        write_lines(
            root.experiment(NAME) / "metrics.jsonl", {"kind": "train", "step": 8, "submission": 1, "attempt": 1}
        )
    (attempt,) = attempts_of(root, NAME, [run_seen(**run)])
    assert attempt.outcome is outcome
    expected = (3, 8, 7) if lock else (0, None, 0)
    assert (attempt.from_step, attempt.reached_step, attempt.saved_step) == expected


def test_attempt_that_left_but_its_steps_has_trained_those_and_saved_what_is_there(root):
    ledger_record(root, saved_step=9)
    points = [{"kind": "train", "step": step, "submission": 2, "attempt": 1} for step in (10, 11, 14)]
    write_lines(root.experiment(NAME) / "metrics.jsonl", *points)
    saved(root, 12)
    attempt = attempts_of(root, NAME, [run_seen(2, exit_code=74)])[-1]
    assert (attempt.outcome, attempt.from_step, attempt.reached_step, attempt.saved_step) == (
        Outcome.DISK_FULL,
        9,
        14,
        12,
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_attempts_killed_before_they_had_loaded_anything_have_not_advanced_and_come_to_an_end(root, recorded):
    ledger_record(root, to_step=5, saved_step=5)
    saved(root, 5)
    for number in range(1, 5):
        if recorded:
            killed = {"code": None, "reason": "killed", "from_step": None, "to_step": None, "saved_step": 5}
            ledger_record(root, submission=2, attempt=number, **killed)
        else:
            before = [{"submission": 2, "attempt": n, "from_step": None} for n in range(1, number)]
            dead_lock(root, submission=2, attempt=number, from_step=None, predecessors=before)
        attempts = attempts_of(root, NAME)
        assert [a.place for a in attempts] == [(1, 1), *((2, n) for n in range(1, number + 1))]
        assert all(not a.advanced and a.reached_step is None for a in attempts[1:])
        assert next_attempt(root, NAME, 2) == number + 1
        decision = decide(Facts(experiment=NAME, finished=False, attempts=attempts, now_s=1e12), Policy())
        assert decision.action is (Action.SUBMIT if number < 4 else Action.STOP), decision
    assert "4 attempts in a row saved nothing new" in decision.reason


@pytest.mark.parametrize(
    ("code", "run", "detail"),
    [
        (75, {"cancelled": True}, "its run was terminated, and it saved step 9"),
        (75, {"state": State.CANCELLED}, "its job was cancelled, and it saved step 9"),
        (1, {"state": State.CANCELLED}, "its job was cancelled"),
    ],
)
def test_attempt_that_was_cancelled_says_by_which_hand_and_what_is_saved(root, code, run, detail):
    ledger_record(root, code=code, reason="stop_file")
    (attempt,) = attempts_of(root, NAME, [run_seen(**run)])
    assert (attempt.outcome, attempt.detail) == (Outcome.CANCELLED, detail)


def test_attempt_that_could_write_nothing_but_into_its_lock_ended_as_that_says(root):
    """All of the run root was full, with Dagster's events: the run knows no more than that its job failed."""
    dead_lock(root, stop_reason="disk_full", exit_code=74, error="OSError: No space left on device")
    (attempt,) = attempts_of(root, NAME, [run_seen(state=State.FAILED, exit_code=1, detail="SLURM job 3 is FAILED")])
    assert (attempt.outcome, attempt.detail) == (Outcome.DISK_FULL, "OSError: No space left on device")


def test_attempt_whose_job_was_killed_for_its_memory_says_so_in_the_schedulers_words(root):
    dead_lock(root)
    seen = run_seen(state=State.FAILED, exit_code=-9, memory_kill="JobId=7 exceeded memory limit", detail="FAILED")
    (attempt,) = attempts_of(root, NAME, [seen])
    assert (attempt.outcome, attempt.detail) == (Outcome.OUT_OF_MEMORY, "JobId=7 exceeded memory limit")


@pytest.mark.parametrize(
    ("run", "detail"),
    [
        ({"detail": "was ended by SIGKILL"}, "was ended by SIGKILL"),
        ({"memory_kill": "exceeded", "detail": "was ended by SIGKILL", "state": State.FAILED}, "exceeded"),
        ({"state": State.NODE_FAIL, "job_id": 94}, "SLURM job 94 is NODE_FAIL"),
        ({"state": State.NODE_FAIL, "job_id": 94, "detail": "interrupted"}, "SLURM job 94 is NODE_FAIL: interrupted"),
        ({"state": State.NODE_FAIL, "detail": "job 94 is NODE_FAIL, on n1"}, "job 94 is NODE_FAIL, on n1"),
    ],
)
def test_attempt_that_was_killed_is_told_alike_before_and_after_its_successor_wrote_its_record(root, run, detail):
    seen = run_seen(**run)
    dead_lock(root)
    (before,) = attempts_of(root, NAME, [seen])
    (root.experiment(NAME) / "LOCK").unlink()
    ledger_record(root, code=None, reason="killed", error="the process vanished without a record: SIGKILL, …")
    (after,) = attempts_of(root, NAME, [seen])
    assert (before.outcome, before.detail) == (after.outcome, after.detail) == (before.outcome, detail)


@pytest.mark.parametrize(
    ("run", "detail"),
    [
        ({"state": State.CANCELLED, "job_id": 94}, "SLURM job 94 is CANCELLED"),
        ({"cancelled": True}, "its run was terminated"),
        ({}, "its run ended without a word"),
    ],
)
def test_attempt_that_came_to_no_trainer_does_not_speak_of_one(root, run, detail):
    (attempt,) = attempts_of(root, NAME, [run_seen(**run)])
    assert attempt.detail == detail


def test_log_of_an_attempt_is_its_trainers_else_its_jobs_if_that_says_anything(root, tmp_path):
    job, trainer = tmp_path / "attempt-1.log", root.experiment(NAME) / "logs" / "submission-01-a1.log"
    seen = [run_seen(log=str(job))]
    assert attempts_of(root, NAME, seen)[0].log == ""
    trainer.parent.mkdir()
    trainer.touch()
    assert attempts_of(root, NAME, seen)[0].log == ""
    job.write_text("slurmstepd: error: exceeded memory limit")
    assert attempts_of(root, NAME, seen)[0].log == str(job)
    trainer.write_text("step 1")
    assert attempts_of(root, NAME, seen)[0].log == str(trainer)


def test_attempt_that_still_lives_is_not_among_those_that_ended(root):
    ledger_record(root)
    runs = [run_seen(1, 1), run_seen(2, 1, live=True)]
    assert [a.place for a in attempts_of(root, NAME, runs)] == [(1, 1)]


def test_attempt_whose_trainer_lives_on_this_host_is_not_among_those_that_ended(root):
    dead_lock(root, pid=os.getpid())
    assert attempts_of(root, NAME) == ()


def test_attempts_of_a_ledger_with_a_torn_last_line_are_those_of_its_whole_lines(root):
    ledger_record(root)
    with (root.experiment(NAME) / "ledger.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"submission": 2, "att')
    assert [a.place for a in attempts_of(root, NAME)] == [(1, 1)]


def test_run_that_found_its_submission_taken_or_done_is_no_attempt(root):
    """As where two daemons have asked for the same: one has trained, the lock has refused the other."""
    ledger_record(root)
    refused, again = run_seen(1, 2, exit_code=73), run_seen(1, 3)
    assert [a.place for a in attempts_of(root, NAME, [run_seen(1, 1), refused, again])] == [(1, 1)]
    ledger_record(root, submission=2, code=1, reason="error")
    assert [a.place for a in attempts_of(root, NAME, [run_seen(2, 2, exit_code=73)])][-1] == (2, 2)


def test_attempt_that_failed_without_a_trace_stays_when_a_later_one_has_saved(root):
    failed = run_seen(1, 1, exit_code=71, detail="out of memory")
    runs = [failed, run_seen(1, 2), run_seen(1, 3)]
    (before,) = attempts_of(root, NAME, runs[:1])
    ledger_record(root, attempt=2)
    after = attempts_of(root, NAME, runs)
    assert [a.place for a in after] == [(1, 1), (1, 2)]
    assert after[0] == before
    assert before.outcome is Outcome.OUT_OF_MEMORY


def test_next_attempt_counts_what_ledger_metrics_and_lock_know(root):
    assert next_attempt(root, NAME, 1) == 1
    ledger_record(root, submission=1, attempt=2)
    assert (next_attempt(root, NAME, 1), next_attempt(root, NAME, 2)) == (3, 1)
    write_lines(root.experiment(NAME) / "metrics.jsonl", {"kind": "train", "step": 8, "submission": 1, "attempt": 4})
    assert next_attempt(root, NAME, 1) == 5
    dead_lock(root, attempt=5)
    assert next_attempt(root, NAME, 1) == 6


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        (None, ""),
        ("x" * 601, "x" * 599 + "…"),
        ("\n  one  \ntwo", "one"),
        ("Traceback (most recent call last):\n  File x\nValueError: no", "ValueError: no"),
    ],
)
def test_telling_line_of_a_message_is_its_first_or_a_tracebacks_last(text, line):
    assert telling_line(text) == line


def test_stop_by_hand_holds_until_it_is_lifted_and_says_who_and_why(root):
    assert control.standing(root, NAME) == control.Standing()
    control.stop(root, NAME, "the disk is being moved")
    stopped = control.standing(root, NAME).stopped
    assert stopped is not None
    assert socket.gethostname() in stopped
    assert stopped.endswith("the disk is being moved")
    control.resume(root, NAME, (3, 2))
    assert control.standing(root, NAME) == control.Standing(forgiven=(3, 2))
    control.stop(root, NAME, "")
    standing = control.standing(root, NAME)
    assert standing.stopped is not None
    assert standing.forgiven == (3, 2)
