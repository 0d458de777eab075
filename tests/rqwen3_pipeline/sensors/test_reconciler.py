"""Ticks of the reconciler on a real Dagster instance and a SLURM that answers from a dictionary."""

import json
import time
from datetime import UTC, datetime

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from rqwen3_pipeline.experiments.observed import NEVER_STARTS_TAG, STATE_TAG
from rqwen3_pipeline.launcher import CANCEL_REQUESTED, JOB_ID
from rqwen3_pipeline.sensors.reconciler import WAITED_TAG, slurm_reconciler
from rqwen3_pipeline.slurm.client import SlurmUnavailable
from rqwen3_pipeline.slurm.states import State
from tests.rqwen3_pipeline.slurm.fake import job
from tests.rqwen3_pipeline.test_launcher import desk, instance_with_launcher, training

__all__ = ["desk", "instance_with_launcher"]


def tick(desk, cursor=None):
    desk.slurm.commands.clear()
    context = dg.build_sensor_context(instance=desk.instance, cursor=cursor)
    said = slurm_reconciler(context).skip_message
    assert len(desk.slurm.commands) <= (3 if "sacct" in desk.slurm.commands else 2)
    return said, context.cursor


def test_sensor_is_on_by_default():
    assert slurm_reconciler.default_status == dg.DefaultSensorStatus.RUNNING


def test_tick_without_slurm_says_so():
    with dg.instance_for_test() as instance:
        context = dg.build_sensor_context(instance=instance)
        assert "not SLURM jobs" in slurm_reconciler(context).skip_message


def test_tick_while_slurm_is_away_judges_nothing(desk):
    run = desk.launch(desk.create())
    desk.put(run, State.FAILED, ended=1.0)
    desk.slurm.failing = [SlurmUnavailable("away")]
    said, _ = tick(desk)
    assert "away" in said
    assert desk.read(run).status == Status.STARTING


def test_tick_fails_a_run_whose_job_can_never_start_and_cancels_the_job(desk):
    run = desk.launch(desk.create())
    desk.put(run, State.PENDING, reason="PartitionTimeLimit")
    tick(desk)
    assert desk.read(run).status == Status.FAILURE
    assert "can never start: PartitionTimeLimit" in desk.messages(run)
    assert desk.slurm.cancelled == [100]


def test_tick_leaves_a_job_that_waits_for_days_alone(desk):
    run = desk.launch(desk.create())
    desk.put(run, State.PENDING, reason="Priority", submitted=time.time() - 10 * 86400)
    tick(desk)
    assert (desk.read(run).status, desk.slurm.cancelled) == (Status.STARTING, [])


def test_ticks_tell_the_run_why_its_job_waits_once_for_each_reason(desk):
    run = desk.launch(desk.create())
    submitted = datetime(2026, 3, 1, 10, tzinfo=UTC).timestamp()
    reasons = ("", "QOSMaxJobsPerUserLimit", "ReqNodeNotAvail, UnavailableNodes:g[1-4]", "ReqNodeNotAvail, May be down")
    for reason in reasons:
        desk.put(run, State.PENDING, reason=reason, submitted=submitted)
        tick(desk)
        tick(desk)
    told = [line for line in desk.messages(run).splitlines() if line.startswith("The run waits for its job")]
    assert ["QOSMaxJobsPerUserLimit" in told[0], "UnavailableNodes:g[1-4]" in told[1], len(told)] == [True, True, 2]
    assert all("submitted at 2026-03-01T10:00:00+00:00" in line for line in told)
    assert desk.read(run).tags[WAITED_TAG] == reasons[2]


def test_tick_fails_a_run_whose_job_ended_before_it_started_with_the_logs_end(desk):
    run = desk.launch(desk.create())
    desk.launcher.files(run).log.write_text("ModuleNotFoundError: No module named 'dagster'\n")
    desk.put(run, State.FAILED, ended=time.time() - 60, reason="NonZeroExitCode")
    tick(desk)
    assert desk.read(run).status == Status.FAILURE
    assert "NonZeroExitCode" in desk.messages(run)
    assert "No module named 'dagster'" in desk.messages(run)


def test_ticks_fail_a_run_whose_job_is_not_there_only_when_it_stays_away(desk):
    run = desk.launch(desk.create())
    desk.slurm.listed.clear()
    _, cursor = tick(desk)
    assert desk.read(run).status == Status.STARTING
    longer_ago = {run_id: since - 200 for run_id, since in json.loads(cursor).items()}
    tick(desk, json.dumps(longer_ago))
    assert desk.read(run).status == Status.FAILURE


def long_missing(desk, run):
    """Ticks that find no job of the run in squeue, the second after the grace; gives the cursor."""
    desk.slurm.listed.clear()
    _, cursor = tick(desk)
    assert "sacct" not in desk.slurm.commands
    return tick(desk, json.dumps({run_id: since - 200 for run_id, since in json.loads(cursor).items()}))[1]


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.UNKNOWN])
@pytest.mark.parametrize("noted", [True, False])
def test_ticks_leave_a_run_alone_whose_job_only_the_accounting_knows(desk, state, noted):
    run = desk.launch(desk.create())
    desk.slurm.accounts = {100: job(100, state, name=f"dg-{run.run_id[:8]}-1")}
    if not noted:
        desk.instance.add_run_tags(run.run_id, {JOB_ID: ""})
    cursor = long_missing(desk, run)
    assert (desk.read(run).status, desk.read(run).tags[JOB_ID]) == (Status.STARTING, "100")
    assert ("squeue does not list it, sacct does" in desk.messages(run)) == (state is not State.UNKNOWN)
    assert json.loads(cursor) == {}  # the grace begins anew


def test_ticks_fail_a_run_whose_job_the_accounting_knows_as_ended_with_its_words(desk):
    run = desk.launch(desk.create())
    desk.slurm.accounts = {100: job(100, State.NODE_FAIL, name=f"dg-{run.run_id[:8]}-1")}
    long_missing(desk, run)
    assert desk.read(run).status == Status.FAILURE
    assert f"The accounting says: SLURM job 100 (dg-{run.run_id[:8]}-1) is NODE_FAIL" in desk.messages(run)


@pytest.mark.parametrize("known", [True, False])
def test_ticks_call_a_run_cancelled_only_when_its_job_is_in_neither_squeue_nor_accounting(desk, known):
    run = desk.started()
    desk.launcher.terminate(run.run_id)
    desk.slurm.cancelled.clear()
    if known:
        desk.slurm.accounts = {100: job(100, State.RUNNING, name=f"dg-{run.run_id[:8]}-1")}
    long_missing(desk, run)
    expected = (Status.CANCELING, [100]) if known else (Status.CANCELED, [])
    assert (desk.read(run).status, desk.slurm.cancelled) == expected


def test_tick_adopts_a_job_whose_id_was_lost(desk):
    run = desk.launch(desk.create())
    desk.instance.add_run_tags(run.run_id, {JOB_ID: ""})
    tick(desk)
    assert desk.read(run).tags[JOB_ID] == "100"


def test_tick_cancels_all_jobs_of_cancelled_runs_in_one_command(desk):
    runs = [desk.launch(desk.create()) for _ in range(3)]
    for run in runs:
        desk.instance.report_run_canceled(run)
    tick(desk)
    assert desk.slurm.cancelled == [100, 101, 102]
    assert desk.slurm.commands.count("scancel") == 1


def test_tick_leaves_jobs_of_other_instances_and_of_the_user_alone(desk):
    desk.slurm.listed = {
        5: job(5, State.RUNNING, name="dg-ffffffff-1", comment="dagster:ffffffff-0000"),
        6: job(6, State.RUNNING, name="jupyter"),
    }
    tick(desk)
    assert desk.slurm.cancelled == []


@pytest.mark.parametrize("job_def", [None, training])
def test_tick_carries_out_a_termination_that_slurm_could_not_take(desk, job_def):
    run = desk.started(**({"job_def": job_def} if job_def else {}))
    desk.slurm.failing = [SlurmUnavailable("away")]
    desk.launcher.terminate(run.run_id)
    tick(desk)
    assert desk.read(run).status == Status.CANCELING
    assert desk.slurm.cancelled == ([] if job_def else [100])
    assert desk.launcher.files(run).stop.exists() == bool(job_def)


def test_tick_cancels_a_training_job_that_does_not_save_in_time_and_then_ends_the_run(desk):
    run = desk.started(job_def=training)
    desk.launcher.terminate(run.run_id)
    tick(desk)
    assert desk.slurm.cancelled == []
    desk.instance.add_run_tags(run.run_id, {CANCEL_REQUESTED: f"{time.time() - 601:.0f}"})
    tick(desk)
    assert desk.slurm.cancelled == [100]
    desk.put(run, State.CANCELLED, ended=time.time() - 60)
    tick(desk)
    assert desk.read(run).status == Status.CANCELED


def test_tick_while_scancel_fails_keeps_the_verdicts_and_tries_again(desk):
    run = desk.launch(desk.create())
    desk.instance.report_run_canceled(run)
    cancel = desk.slurm.cancel
    desk.slurm.cancel = lambda *_: (_ for _ in ()).throw(SlurmUnavailable("away"))
    said, _ = tick(desk)
    assert "tried again" in said
    desk.slurm.cancel = cancel
    tick(desk)
    assert desk.slurm.cancelled == [100]


def test_tick_notes_on_each_run_how_its_job_ended_and_that_it_can_never_start(desk):
    live, over, waiting = desk.started(), desk.started(), desk.launch(desk.create())
    desk.put(live, State.RUNNING)
    desk.instance.report_run_failed(over)
    desk.put(over, State.NODE_FAIL, ended=time.time() - 60)
    desk.put(waiting, State.PENDING, reason="PartitionTimeLimit")
    tick(desk)
    assert desk.read(live).tags.get(STATE_TAG) is None
    assert desk.read(over).tags[STATE_TAG] == "NODE_FAIL"
    assert "PartitionTimeLimit" in desk.read(waiting).tags[NEVER_STARTS_TAG]


def test_job_that_the_reconciler_itself_cancels_does_not_read_as_cancelled_by_a_person(desk):
    run = desk.started()
    desk.instance.report_run_failed(run)
    desk.put(run, State.PENDING)
    tick(desk)
    desk.put(run, State.CANCELLED, ended=time.time() - 60)
    tick(desk)
    assert desk.read(run).tags[STATE_TAG] == "UNKNOWN"


def test_run_that_copies_the_tags_of_another_begins_without_what_was_noted_on_that(desk):
    noted = {
        STATE_TAG: "CANCELLED",
        WAITED_TAG: "Priority",
        NEVER_STARTS_TAG: "PartitionTimeLimit",
        CANCEL_REQUESTED: "1",
    }
    run = desk.launch(desk.create(**noted))
    assert not any(desk.read(run).tags.get(tag) for tag in noted)
