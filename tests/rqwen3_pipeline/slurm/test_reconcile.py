import pytest

from rqwen3_pipeline.slurm.reconcile import Patience, Run, Verdict, belongs, decide, pick
from rqwen3_pipeline.slurm.states import State
from tests.rqwen3_pipeline.slurm.fake import job

RUN, NOW = "1234abcd-0000-0000-0000-000000000000", 10_000.0
PATIENCE = Patience(missing_s=120, save_s=600)


def run(status, **more):
    facts = {"job_id": 7, "saves": False, "cancel_requested": None, "ended": None, **more}
    return Run(run_id=RUN, status=status, **facts)


def own(state, job_id=7, **more):
    return job(job_id, state, name="dg-1234abcd-1", comment=f"dagster:{RUN}", **more)


def verdict(a_run, a_job, missing_since=None):
    jobs = {a_job.job_id: a_job} if a_job else {}
    actions, _ = decide([a_run], jobs, {RUN: missing_since} if missing_since else {}, NOW, PATIENCE)
    return actions[0].verdict if actions else None


@pytest.mark.parametrize(
    ("status", "state", "more", "expected"),
    [
        ("STARTING", State.PENDING, {"reason": "Priority"}, None),
        ("STARTING", State.PENDING, {"reason": "JobHeldUser"}, None),
        ("STARTING", State.PENDING, {"reason": "PartitionTimeLimit"}, Verdict.FAIL_AND_CANCEL),
        ("STARTING", State.RUNNING, {"reason": "PartitionTimeLimit"}, None),
        ("STARTING", State.UNKNOWN, {}, None),
        ("STARTING", State.COMPLETING, {}, None),
        ("STARTING", State.FAILED, {"ended": NOW - 5}, None),
        ("STARTING", State.FAILED, {"ended": NOW - 31}, Verdict.FAIL),
        ("STARTING", State.COMPLETED, {"ended": NOW - 31}, Verdict.FAIL),
        ("STARTING", State.CANCELLED, {"ended": None}, Verdict.FAIL),
        ("STARTED", State.RUNNING, {}, None),
        ("STARTED", State.FAILED, {"ended": NOW - 500}, None),
        ("CANCELING", State.RUNNING, {}, Verdict.CANCEL_JOB),
        ("CANCELING", State.COMPLETING, {}, None),
        ("CANCELING", State.CANCELLED, {"ended": NOW - 5}, None),
        ("CANCELING", State.CANCELLED, {"ended": NOW - 31}, Verdict.CANCELED),
        ("FINISHED", State.PENDING, {}, Verdict.CANCEL_JOB),
        ("FINISHED", State.COMPLETING, {}, None),
        ("FINISHED", State.FAILED, {}, None),
        ("FINISHED", State.UNKNOWN, {}, None),
    ],
)
def test_run_and_job_that_disagree_are_put_right(status, state, more, expected):
    assert verdict(run(status), own(state, **more)) is expected


@pytest.mark.parametrize(
    ("state", "unexplained", "expected"),
    [
        (State.FAILED, True, None),
        (State.TIMEOUT, True, Verdict.EXPLAIN),
        (State.CANCELLED, True, Verdict.EXPLAIN),
        (State.CANCELLED, False, None),
        (State.COMPLETED, True, None),
    ],
)
def test_failed_run_is_told_once_how_slurm_ended_it(state, unexplained, expected):
    assert verdict(run("FINISHED", unexplained=unexplained), own(state)) is expected


@pytest.mark.parametrize(
    ("status", "state"), [("STARTING", "PENDING"), ("STARTING", "RUNNING"), ("STARTED", "RUNNING")]
)
def test_end_asked_for_while_slurm_was_away_is_carried_out(status, state):
    assert verdict(run(status, cancel_requested=NOW - 9), own(State[state])) is Verdict.CANCEL


def test_training_asked_to_end_while_slurm_was_away_saves_first():
    assert verdict(run("STARTED", cancel_requested=NOW - 9, saves=True), own(State.RUNNING)) is Verdict.SAVE


@pytest.mark.parametrize(("asked_s", "expected"), [(599, None), (601, Verdict.CANCEL_JOB)])
def test_training_being_cancelled_has_its_time_to_save_and_no_more(asked_s, expected):
    assert verdict(run("CANCELING", saves=True, cancel_requested=NOW - asked_s), own(State.RUNNING)) is expected


@pytest.mark.parametrize(
    ("saves", "ended_s", "expected"),
    [(False, 59, None), (False, 61, Verdict.CANCEL_JOB), (True, 599, None), (True, 601, Verdict.CANCEL_JOB)],
)
def test_job_of_a_finished_run_may_end_by_itself_for_a_while(saves, ended_s, expected):
    assert verdict(run("FINISHED", saves=saves, ended=NOW - ended_s), own(State.RUNNING)) is expected


@pytest.mark.parametrize(
    ("status", "expected"), [("STARTING", Verdict.FAIL), ("CANCELING", Verdict.CANCELED), ("STARTED", None)]
)
def test_job_missing_counts_as_lost_only_after_the_grace(status, expected):
    assert verdict(run(status), None) is None
    assert verdict(run(status), None, NOW - 119) is None
    assert verdict(run(status), None, NOW - 121) is expected


def test_missing_job_that_comes_back_begins_its_grace_anew():
    _, missing = decide([run("STARTING")], {}, {}, NOW, PATIENCE)
    assert missing == {RUN: NOW}
    _, missing = decide([run("STARTING")], {7: own(State.PENDING)}, missing, NOW + 60, PATIENCE)
    assert missing == {}


def test_job_that_nobody_noted_is_adopted_by_its_name():
    assert verdict(run("STARTING", job_id=None), own(State.PENDING)) is Verdict.ADOPT


def test_second_waiting_job_of_a_run_is_cancelled_and_a_running_one_left():
    jobs = {7: own(State.RUNNING), 8: own(State.PENDING, 8), 9: own(State.RUNNING, 9)}
    actions, _ = decide([run("STARTED")], jobs, {}, NOW, PATIENCE)
    assert [(action.verdict, action.job_id) for action in actions] == [(Verdict.CANCEL_JOB, 8)]


def test_noted_job_of_another_run_is_not_taken_for_this_runs():
    stranger = job(7, State.FAILED, name="dg-ffff0000-1", comment="dagster:ffff0000-1")
    assert pick(run("STARTING"), {7: stranger}) is None
    assert pick(run("STARTING"), {7: stranger, 8: own(State.PENDING, 8)}).job_id == 8


def test_job_whose_comment_the_site_changed_is_known_by_name_and_never_against_its_comment():
    assert belongs(job(7, State.RUNNING, name="dg-1234abcd-2", comment="project 5"), RUN)
    assert not belongs(job(7, State.RUNNING, name="dg-1234abcd-2", comment="dagster:other"), RUN)
