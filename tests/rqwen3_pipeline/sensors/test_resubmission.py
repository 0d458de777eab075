"""Ticks of the resubmission sensor over a real instance, with runs and ledgers as they come to be."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.errors import DagsterExecutionInterruptedError

from model.files import write_json, write_text
from rqwen3_pipeline.assets.common import Pipeline
from rqwen3_pipeline.assets.submissions import _attempt
from rqwen3_pipeline.definitions import defs
from rqwen3_pipeline.experiments import observed
from rqwen3_pipeline.experiments.facts import attempts_of
from rqwen3_pipeline.experiments.observed import failure_of, runs_seen
from rqwen3_pipeline.experiments.policy import Outcome
from rqwen3_pipeline.sensors.resubmission import resubmission
from rqwen3_pipeline.settings import Settings
from rqwen3_pipeline.slurm.run_job import JobFiles
from rqwen3_pipeline.slurm.states import State
from tests.rqwen3_pipeline.slurm.fake import FakeSlurm, job


@pytest.fixture
def here(corpus_run, monkeypatch):
    monkeypatch.setenv("RQWEN3_PROFILE", str(corpus_run.config_path))
    monkeypatch.setenv("RQWEN3_HOME", str(corpus_run.root.path))
    write_json(corpus_run.folder / "preflight.json", {"passed": True, "checks": []})
    return corpus_run


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def tick(instance: dg.DagsterInstance) -> dg.SensorResult:
    context = dg.build_sensor_context(instance, definitions=defs)
    result = resubmission(context)
    assert isinstance(result, dg.SensorResult)
    return result


def request(instance: dg.DagsterInstance) -> dg.RunRequest:
    (asked,) = tick(instance).run_requests or []
    return asked


def skipped(instance: dg.DagsterInstance) -> str:
    result = tick(instance)
    assert not result.run_requests
    assert result.skip_reason is not None
    return str(result.skip_reason.skip_message)


def launch(instance: dg.DagsterInstance, asked: dg.RunRequest, status: DagsterRunStatus) -> dg.DagsterRun:
    """What the daemon does with a request."""
    instance.add_dynamic_partitions("submissions", [str(asked.partition_key)])
    job = defs.resolve_job_def("train_submission")
    tags = {**asked.tags, "dagster/partition": str(asked.partition_key), "dagster/run_key": str(asked.run_key)}
    return instance.create_run_for_job(job, tags=tags, status=status)


def test_tick_before_any_attempt_asks_for_the_first_submission(here, instance):
    asked = request(instance)
    assert (asked.run_key, asked.partition_key) == ("small/01/a1", "small.01")
    assert request(instance).run_key == "small/01/a1"


def test_tick_under_a_red_preflight_asks_for_nothing_and_says_why(here, instance):
    checks = [{"check": "free_space", "passed": False, "said": "2 GiB free"}]
    write_json(here.folder / "preflight.json", {"passed": False, "checks": checks})
    assert "preflight: free_space: 2 GiB free" in skipped(instance)


@pytest.mark.parametrize("status", ["NOT_STARTED", "STARTING", "STARTED", "CANCELING"])
def test_tick_beside_a_live_run_asks_for_nothing(here, instance, status):
    launch(instance, request(instance), DagsterRunStatus[status])
    assert "may still be running" in skipped(instance)


def test_tick_after_a_slice_that_was_cut_and_saved_asks_for_the_next(here, instance):
    launch(instance, request(instance), DagsterRunStatus.SUCCESS)
    here.log_steps(1, 1, 80)
    here.end(1, 0, 80, 80, "deadline", 75)
    here.save(80)
    assert request(instance).run_key == "small/02/a1"


def test_tick_after_a_run_that_somebody_cancelled_stops_until_it_is_resumed(here, instance):
    from rqwen3_pipeline.experiments import control

    launch(instance, request(instance), DagsterRunStatus.CANCELED)
    here.end(1, 0, 40, 40, "stop_file", 75)
    here.save(40)
    assert "rqwen3 experiment resume small" in skipped(instance)
    control.resume(here.root, "small", (1, 1))
    assert request(instance).run_key == "small/02/a1"


@pytest.mark.parametrize("tags", [{"slurm/cancel_requested": "1"}, {"slurm/state": "CANCELLED"}])
def test_tick_after_a_terminated_run_or_a_scancel_reads_it_as_cancelled_though_it_failed_or_saved(here, instance, tags):
    run = launch(instance, request(instance), DagsterRunStatus.STARTED)
    here.end(1, 0, 40, 40, "SIGTERM", 75)
    here.save(40)
    instance.report_run_failed(run)
    assert request(instance).run_key == "small/02/a1"
    instance.add_run_tags(run.run_id, tags)
    assert "small.01 ended cancelled" in skipped(instance)
    instance.add_run_tags(run.run_id, dict.fromkeys(tags, ""))  # as a run that was copied from a cancelled one
    assert request(instance).run_key == "small/02/a1"


@pytest.mark.parametrize(
    ("state", "code", "outcome"),
    [
        (State.CANCELLED, "0:15", Outcome.CANCELLED),
        (State.FAILED, "137:0", Outcome.LOST),  # a worker that was killed before its trainer had begun
        (State.FAILED, "0:9", Outcome.LOST),
        (State.FAILED, "1:0", Outcome.ERROR),
        (None, None, Outcome.LOST),  # the controller lost it with its own state
    ],
)
def test_end_of_the_newest_job_is_asked_for_once_and_noted_for_good(here, instance, state, code, outcome):
    run = launch(instance, request(instance), DagsterRunStatus.STARTED)
    instance.report_run_failed(run)
    instance.add_run_tags(run.run_id, {"slurm/job_id": "7"})
    slurm = FakeSlurm()
    if state is not None:
        slurm.listed[7] = job(7, state, name=f"dg-{run.run_id[:8]}-1", exit_code=code)
    for _ in range(2):
        seen = runs_seen(instance, "small", {}, slurm)
        (attempt,) = attempts_of(here.root, "small", seen)
        assert attempt.outcome is outcome
        if state is not None:
            slurm.job = lambda job_id: pytest.fail("asked again")


def fail_as_job(instance: dg.DagsterInstance, run: dg.DagsterRun, job_id: int, said: str, path: Path, log: str) -> None:
    """A run whose job has printed `log` to `path`, and that failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(log)
    instance.add_run_tags(run.run_id, {"slurm/job_id": str(job_id), "slurm/state": "FAILED", "slurm/exit_code": "0:9"})
    instance.report_run_failed(run, said)


def test_attempt_is_told_as_it_was_when_newer_runs_exist_and_its_logs_are_read_once(here, instance, monkeypatch):
    def files(run: dg.DagsterRun) -> JobFiles:
        return JobFiles(folder=here.folder / "jobs" / run.run_id, attempt=1)

    monkeypatch.setattr(instance.run_launcher, "files", files, raising=False)
    oom = "slurmstepd: error: StepId=104.batch exceeded memory limit (9 > 8), being killed\n"
    told = []
    for number, log in enumerate((oom, "", oom), 1):
        asked = dg.RunRequest(run_key=str(number), partition_key="small.01", tags={"rqwen3/attempt": str(number)})
        run = launch(instance, asked, DagsterRunStatus.STARTED)
        fail_as_job(instance, run, 100 + number, f"SLURM: job {number} was ended by SIGKILL", files(run).log, log)
        attempts = attempts_of(here.root, "small", runs_seen(instance, "small", {}, slurm := FakeSlurm()))
        told.append(attempts[-1])
        assert list(attempts) == told
        assert slurm.commands in ([], ["scontrol"])  # of the newest alone, if at all
    assert [a.outcome for a in told] == [Outcome.OUT_OF_MEMORY, Outcome.LOST, Outcome.OUT_OF_MEMORY]
    assert told[0].detail == "StepId=104.batch exceeded memory limit (9 > 8), being killed"
    assert told[1].detail == "SLURM: job 2 was ended by SIGKILL"
    monkeypatch.setattr(observed, "failure_of", lambda *_: pytest.fail("read again"))
    assert list(attempts_of(here.root, "small", runs_seen(instance, "small", {}))) == told


def test_attempt_launched_by_hand_that_never_began_keeps_its_place_beside_the_next(here, instance):
    by_hand = dg.RunRequest(run_key="", partition_key="small.01")
    pending = launch(instance, by_hand, DagsterRunStatus.STARTING)
    instance.add_run_tags(pending.run_id, {"slurm/job_id": "94", "slurm/state": "CANCELLED"})
    instance.report_run_failed(pending, "SLURM job 94 is CANCELLED by 1000")
    run = launch(instance, by_hand, DagsterRunStatus.STARTED)
    context: Any = SimpleNamespace(instance=instance, run=run, partition_key="small.01")
    number = _attempt(context, Pipeline(Settings()), "small", 1)
    instance.add_run_tags(run.run_id, {"rqwen3/attempt": str(number)})
    here.end(1, 0, 80, 80, "deadline", 75, attempt=number)
    instance.report_run_failed(run)
    told = attempts_of(here.root, "small", runs_seen(instance, "small", {}))
    assert [(a.place, a.outcome) for a in told] == [((1, 1), Outcome.CANCELLED), ((1, 2), Outcome.SAVED)]
    assert told[0].detail == "SLURM job 94 is CANCELLED by 1000"


def test_run_that_was_copied_from_a_failed_one_is_told_by_its_own_failure(here, instance):
    first = launch(instance, request(instance), DagsterRunStatus.STARTED)
    instance.add_run_tags(first.run_id, {"slurm/job_id": "7"})
    instance.report_run_failed(first, "one thing")
    assert runs_seen(instance, "small", {})[-1].detail == "one thing"
    copied = {**instance.get_run_by_id(first.run_id).tags, "slurm/failure": "one thing"}
    job_def = defs.resolve_job_def("train_submission")
    ids = {"parent_run_id": first.run_id, "root_run_id": first.run_id}
    again = instance.create_run_for_job(job_def, tags=copied, status=DagsterRunStatus.STARTED, **ids)
    instance.report_run_failed(again, "another")
    assert runs_seen(instance, "small", {})[-1].detail == "another"


def test_tick_after_a_failure_stops_and_says_what_failed(here, instance):
    run = launch(instance, request(instance), DagsterRunStatus.STARTED)
    here.end(1, 0, 3, 0, "error", 1, error="Traceback (most recent call last):\n  x\nValueError: no such thing")
    instance.report_run_failed(run)
    assert "small.01 ended error: ValueError: no such thing" in skipped(instance)


def test_tick_after_a_run_that_failed_and_was_executed_again_by_hand_goes_on(here, instance):
    """A run that copies the tags of another, its run key too, is another attempt as soon as it has begun."""
    asked = request(instance)
    launch(instance, asked, DagsterRunStatus.FAILURE)
    assert "small.01 ended error" in skipped(instance)
    again = launch(instance, asked, DagsterRunStatus.STARTED)
    assert "may still be running" in skipped(instance)
    here.end(1, 0, 80, 80, "deadline", 75, attempt=1)
    here.save(80)
    instance.report_run_failed(again)
    assert request(instance).run_key == "small/02/a1"


def test_tick_after_a_run_was_deleted_asks_for_it_again(here, instance):
    run = launch(instance, request(instance), DagsterRunStatus.FAILURE)
    instance.delete_run(run.run_id)
    assert request(instance).run_key == "small/01/a1"


def test_tick_of_a_finished_run_asks_for_nothing(here, instance):
    here.train_all()
    assert "finished" in skipped(instance)


def test_tick_asks_for_each_experiment_of_the_run_root(here, instance):
    from rqwen3_pipeline.experiments.variation import make_variation

    make_variation(here.root, here.run, "cooler", ["training.learning_rate=5e-4"], "small")
    assert {asked.run_key for asked in tick(instance).run_requests or []} == {"small/01/a1", "cooler/01/a1"}


def test_tick_leaves_an_experiment_alone_that_can_not_be_read_and_goes_on_with_the_others(here, instance):
    for name, text in (("Odd näme", "[run]"), ("torn", '[run\nname = "to')):
        write_text(here.root.path / "experiments" / name / "config.toml", text)
    assert request(instance).run_key == "small/01/a1"
    here.train_all()
    said = skipped(instance)
    assert "'Odd näme' is no experiment name" in said
    assert "torn: left alone: " in said
    assert "small: stop: finished" in said


def test_sensor_is_off_until_somebody_turns_it_on():
    assert resubmission.default_status is dg.DefaultSensorStatus.STOPPED


def test_run_that_was_interrupted_is_told_in_words(instance):
    @dg.op
    def trains():
        raise DagsterExecutionInterruptedError

    @dg.job
    def interrupted():
        trains()

    result = interrupted.execute_in_process(instance=instance, raise_on_error=False)
    assert failure_of(instance, result.run_id) == "its run was interrupted (Ctrl-C or SIGTERM)"
