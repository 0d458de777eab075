"""The launcher on a real Dagster instance and a SLURM that answers from a dictionary."""

import errno
import logging
import os
import subprocess
import sys
import time

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.errors import DagsterLaunchFailedError, DagsterUserCodeUnreachableError
from dagster._core.launcher import LaunchRunContext, WorkerStatus
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.test_utils import instance_for_test
from dagster._daemon.monitoring.run_monitoring import monitor_started_run

from model import files
from rqwen3_pipeline import launcher as launching
from rqwen3_pipeline.launcher import ATTEMPT, CANCEL_REQUESTED, JOB_ID
from rqwen3_pipeline.slurm.client import Slurm, SlurmError, SlurmRejected, SlurmUnavailable, SlurmUnclear
from rqwen3_pipeline.slurm.states import Phase, State
from tests.rqwen3_pipeline.slurm.fake import FakeSlurm, job

SITE = """
[options]
partition = "cpu"
time = "1:00:00"
[options.gpu]
partition = "gpu"
gres = "gpu:l40s:1"
"""


@dg.op(tags={"slurm/cpus_per_task": "2", "slurm/mem": "4G"})
def small():
    pass


@dg.op(tags={"slurm/cpus_per_task": "8", "slurm/time": "30"})
def wide():
    pass


@dg.op(tags={"slurm/kind": "gpu", "slurm/stop": "save"})
def trains():
    pass


@dg.job
def two_steps():
    small()
    wide()


@dg.job
def training():
    trains()


ORIGIN = JobPythonOrigin(
    "two_steps",
    RepositoryPythonOrigin(
        executable_path=sys.executable,
        code_pointer=ModuleCodePointer("tests.rqwen3_pipeline.test_launcher", "two_steps"),
        entry_point=["dagster"],
    ),
)


class Desk:
    """An instance with the launcher, and short ways to do things with it."""

    def __init__(self, instance):
        self.instance, self.launcher = instance, instance.run_launcher
        self.slurm = self.launcher.slurm = FakeSlurm()

    def create(self, job_def=two_steps, status=Status.STARTING, **tags):
        tags = {key.replace("__", "/"): value for key, value in tags.items()}
        return self.instance.create_run_for_job(job_def, tags=tags, status=status, job_code_origin=ORIGIN)

    def launch(self, run):
        self.launcher.launch_run(LaunchRunContext(self.instance.get_run_by_id(run.run_id), workspace=None))
        return self.read(run)

    def read(self, run):
        return self.instance.get_run_by_id(run.run_id)

    def started(self, state=State.RUNNING, job_def=two_steps, **more):
        """A started run whose job is in that state."""
        run = self.launch(self.create(job_def))
        self.instance.report_engine_event("started", run)
        self.set_status(run, dg.DagsterEventType.RUN_START)
        self.put(run, state, **more)
        return self.read(run)

    def set_status(self, run, event):
        self.instance.report_dagster_event(
            dg.DagsterEvent(event_type_value=event.value, job_name=run.job_name), run_id=run.run_id
        )

    def put(self, run, state, **more):
        job_id = int(self.read(run).tags[JOB_ID])
        name, comment = f"dg-{run.run_id[:8]}-1", f"dagster:{run.run_id}"
        self.slurm.listed[job_id] = job(job_id, state, name=name, comment=comment, **more)

    def messages(self, run):
        events = (entry.dagster_event for entry in self.instance.all_logs(run.run_id))
        return "\n".join(event.message or "" for event in events if event is not None)


@pytest.fixture(scope="session")
def instance_with_launcher(tmp_path_factory):
    """One instance for all tests here, since making one takes seconds."""
    folder = tmp_path_factory.mktemp("an instance")
    (folder / "site.toml").write_text(SITE)
    config = {"home": str(folder), "cluster": str(folder / "site.toml")}
    overrides = {
        "run_launcher": {"module": "rqwen3_pipeline.launcher", "class": "SlurmRunLauncher", "config": config},
        "run_monitoring": {"enabled": True, "max_resume_run_attempts": 0},
    }
    with instance_for_test(overrides=overrides) as instance:
        yield instance


@pytest.fixture
def desk(instance_with_launcher, monkeypatch):
    monkeypatch.setattr(launching, "LOOK_PAUSE_S", 0.0)
    instance_with_launcher.wipe()
    return Desk(instance_with_launcher)


def test_launch_of_two_steps_asks_for_the_most_of_each_and_notes_the_job(desk):
    run = desk.launch(desk.create())
    ((options, script),) = desk.slurm.submitted
    assert (options.partition, options.cpus_per_task, options.mem, options.time) == ("cpu", "8", "4G", "0-01:30:00")
    assert (options.job_name, options.comment) == (f"dg-{run.run_id[:8]}-1", f"dagster:{run.run_id}")
    assert (run.tags[JOB_ID], run.tags[ATTEMPT]) == ("100", "1")
    assert "execute_run" in script
    assert "set_exit_code_on_failure" in script
    assert str(desk.launcher.home) in desk.launcher.files(run).script.read_text()
    assert "SLURM job 100 submitted" in desk.messages(run)


def test_launch_takes_run_tags_over_op_tags_over_the_site(desk):
    desk.launch(desk.create(slurm__partition="long", slurm__cpus_per_task="16"))
    desk.launch(desk.create(training))
    assert [(o.partition, o.cpus_per_task, o.gres) for o, _ in desk.slurm.submitted] == [
        ("long", "16", None),
        ("gpu", None, "gpu:l40s:1"),
    ]


@pytest.mark.parametrize(("tag", "value"), [("slurm__partitoin", "x"), ("slurm__qos", "a\nb"), ("slurm__qos", "$(id)")])
def test_launch_with_a_bad_tag_fails_with_words_and_sends_nothing(desk, tag, value):
    run = desk.create(**{tag: value})
    with pytest.raises(DagsterLaunchFailedError):
        desk.launch(run)
    assert desk.slurm.commands == []
    assert desk.read(run).status == Status.FAILURE
    assert tag.replace("__", "/") in desk.messages(run)


def test_launch_refused_by_sbatch_fails_with_its_words(desk):
    desk.slurm.failing = [SlurmRejected("sbatch refused: Invalid qos specification")]
    run = desk.create()
    with pytest.raises(DagsterLaunchFailedError, match="Invalid qos"):
        desk.launch(run)
    for words in ("Invalid qos specification. ", "/site.toml, or in tags slurm/", "rqwen3 doctor"):
        assert words in desk.messages(run)


def test_launch_without_sbatch_on_path_fails_at_once_with_the_way_out(desk, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(desk.launcher, "slurm", Slurm())
    run = desk.create()
    with pytest.raises(DagsterLaunchFailedError, match="not found on PATH"):
        desk.launch(run)
    assert desk.read(run).status == Status.FAILURE
    assert "sbatch: not found on PATH" in desk.messages(run)


def test_launch_while_slurm_is_away_goes_back_to_the_queue_and_succeeds_later(desk):
    run = desk.create()
    desk.slurm.failing = [SlurmUnavailable("away")] * 9
    with pytest.raises(DagsterUserCodeUnreachableError):
        desk.launch(run)
    assert desk.read(run).status == Status.STARTING
    desk.slurm.failing = []
    assert desk.launch(run).tags[JOB_ID] == "100"
    assert len(desk.slurm.submitted) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_launch_while_the_file_system_gives_no_locks_goes_back_to_the_queue(desk, monkeypatch, number):
    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    run = desk.create()
    with monkeypatch.context() as patched:
        patched.setattr(files.fcntl, "flock", no_locks)
        with pytest.raises(DagsterUserCodeUnreachableError, match="takes no file locks"):
            desk.launch(run)
    assert desk.read(run).status == Status.STARTING
    assert desk.launch(run).tags[JOB_ID] == "100"


@pytest.mark.parametrize("doubt", [SlurmUnavailable("Socket timed out"), SlurmUnclear("named no job")])
def test_launch_whose_sbatch_is_in_doubt_adopts_the_job_that_is_there(desk, doubt):
    desk.slurm.failing, desk.slurm.accepts_though_it_fails = [doubt], True
    assert desk.launch(desk.create()).tags[JOB_ID] == "100"
    assert len(desk.slurm.submitted) == 1


def test_launch_after_which_slurm_vanished_adopts_the_waiting_job_at_the_next_try(desk):
    run = desk.create()
    desk.slurm.failing, desk.slurm.accepts_though_it_fails = [SlurmUnavailable("timed out")] * 5, True
    with pytest.raises(DagsterUserCodeUnreachableError):
        desk.launch(run)
    desk.slurm.failing = []
    assert desk.launch(run).tags[JOB_ID] == "100"
    assert len(desk.slurm.submitted) == 1


def test_launch_whose_job_of_an_earlier_try_runs_waits_and_then_sends_another(desk):
    run = desk.create()
    desk.slurm.failing, desk.slurm.accepts_though_it_fails = [SlurmUnavailable("timed out")] * 5, True
    with pytest.raises(DagsterUserCodeUnreachableError):
        desk.launch(run)
    name = desk.slurm.submitted[0][0].job_name
    desk.slurm.listed[100] = job(100, State.RUNNING, name=name)
    with pytest.raises(DagsterUserCodeUnreachableError, match="must end first"):
        desk.launch(run)
    desk.slurm.listed[100] = job(100, State.COMPLETED, name=name)
    tags = desk.launch(run).tags
    assert (tags[JOB_ID], tags[ATTEMPT]) == ("101", "2")


def test_launch_whose_sbatch_named_no_job_and_left_none_fails_and_sends_no_second(desk):
    desk.slurm.failing = [SlurmUnclear("named no job")]
    run = desk.create()
    with pytest.raises(DagsterLaunchFailedError, match="nothing was sent a second time"):
        desk.launch(run)
    assert desk.slurm.commands.count("sbatch") == 1


def test_launch_of_a_copied_run_forgets_the_old_runs_job(desk):
    run = desk.launch(desk.create(slurm__job_id="55", slurm__cancel_requested="1"))
    assert (run.tags[JOB_ID], run.tags[CANCEL_REQUESTED]) == ("100", "")


def test_launch_of_a_local_run_goes_to_the_daemons_host(desk, monkeypatch):
    launched = []
    monkeypatch.setattr(desk.launcher._local, "launch_run", launched.append)
    run = desk.launch(desk.create(slurm__where="local"))
    assert len(launched) == 1
    assert desk.slurm.commands == []
    assert desk.launcher.check_run_worker_health(run).status == WorkerStatus.RUNNING


HEALTH = {Phase.FAILED: WorkerStatus.FAILED}


def test_health_is_failed_exactly_for_a_job_that_ended_badly(desk):
    run = desk.started()
    for state in State:
        desk.put(run, state, ended=time.time() - 5 if state is State.COMPLETED else None)
        expected = HEALTH.get(state.phase, WorkerStatus.RUNNING)
        assert desk.launcher.check_run_worker_health(run).status == expected, state


@pytest.mark.parametrize("error", [SlurmUnavailable("away"), SlurmError("garbage")])
def test_health_while_slurm_can_not_be_read_is_running_and_the_monitor_lets_the_run_be(desk, error):
    run = desk.started()
    desk.slurm.failing = [error]
    assert desk.launcher.check_run_worker_health(run).status == WorkerStatus.RUNNING
    desk.slurm.failing = [error]
    monitor(desk, run)
    assert desk.read(run).status == Status.STARTED


def test_health_of_a_completed_job_whose_run_is_still_started_is_failed_after_a_minute(desk):
    run = desk.started(State.COMPLETED, ended=time.time() - 50)
    assert desk.launcher.check_run_worker_health(run).status == WorkerStatus.RUNNING
    desk.put(run, State.COMPLETED, ended=time.time() - 70)
    assert desk.launcher.check_run_worker_health(run).status == WorkerStatus.FAILED


def test_health_of_a_job_that_nobody_lists_is_failed_only_after_the_grace(desk):
    run = desk.started()
    desk.slurm.listed.clear()
    assert desk.launcher.check_run_worker_health(run).status == WorkerStatus.RUNNING
    desk.launcher._missing_since[run.run_id] -= 121
    assert desk.launcher.check_run_worker_health(run).status == WorkerStatus.FAILED


def monitor(desk, run):
    record = desk.instance.get_run_record_by_id(run.run_id)
    monitor_started_run(desk.instance, None, record, logging.getLogger("test"))


def test_monitor_fails_a_run_whose_job_ran_out_of_memory_with_reason_and_log(desk):
    run = desk.started(State.OUT_OF_MEMORY, exit_code="0:125", reason="OutOfMemory")
    desk.launcher.files(run).log.write_text("\n".join(f"line {i}" for i in range(50)))
    monitor(desk, run)
    assert desk.read(run).status == Status.FAILURE
    said = desk.messages(run)
    assert "OUT_OF_MEMORY" in said
    assert "exit code 0:125" in said
    assert "line 49" in said
    assert "line 29\n" not in said


def test_debug_info_without_a_log_says_where_it_would_be(desk):
    run = desk.started()
    said = desk.launcher.get_run_worker_debug_info(run)
    assert "RUNNING" in said
    assert str(desk.launcher.files(run).log) in said


def test_terminate_cancels_an_ordinary_job_at_once(desk):
    run = desk.started()
    assert desk.launcher.terminate(run.run_id)
    assert desk.slurm.cancelled == [100]
    assert desk.read(run).status == Status.CANCELING
    assert desk.launcher.terminate(run.run_id)


def test_terminate_of_a_training_job_asks_it_to_save_and_cancels_nothing(desk):
    run = desk.started(job_def=training)
    assert desk.launcher.terminate(run.run_id)
    assert desk.launcher.files(run).stop.read_text() == "cancel"
    assert desk.slurm.cancelled == []
    assert desk.read(run).status == Status.CANCELING


def test_terminate_while_slurm_is_away_leaves_the_run_started_and_notes_the_wish(desk):
    run = desk.started()
    desk.slurm.failing = [SlurmUnavailable("away")]
    assert not desk.launcher.terminate(run.run_id)
    run = desk.read(run)
    assert run.status == Status.STARTED
    assert float(run.tags[CANCEL_REQUESTED]) == pytest.approx(time.time(), abs=60)
    assert run.tags[JOB_ID] == "100"


@pytest.mark.parametrize("listed", [True, False])
def test_terminate_of_a_run_whose_job_is_over_ends_it(desk, listed):
    run = desk.started(State.CANCELLED)
    if not listed:
        desk.slurm.listed.clear()
    assert desk.launcher.terminate(run.run_id)
    assert desk.read(run).status == Status.CANCELED
    assert not desk.launcher.terminate(run.run_id)


def test_polling_many_runs_asks_squeue_alone(desk):
    runs = [desk.started() for _ in range(5)]
    desk.slurm.commands.clear()
    for run in runs:
        desk.launcher.check_run_worker_health(run)
    assert set(desk.slurm.commands) == {"squeue"}


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING])
def test_launch_that_a_second_daemon_makes_of_what_it_read_before_sends_nothing(desk, state):
    stale = desk.create()
    desk.launch(stale)
    desk.put(stale, state)
    desk.launcher.launch_run(LaunchRunContext(stale, workspace=None))
    desk.set_status(stale, dg.DagsterEventType.RUN_START)
    desk.launcher.launch_run(LaunchRunContext(stale, workspace=None))
    assert len(desk.slurm.submitted) == 1
    assert desk.read(stale).status == Status.STARTED


TAKE_TURNS = """
import random, sys, threading, time
from pathlib import Path
from rqwen3_pipeline.launcher import _wait_for_lock

def take(seed):
    draw = random.Random(seed)
    for _ in range(25):
        with open(sys.argv[1 + draw.randrange(2)], "w") as file:
            _wait_for_lock(file, Path(sys.argv[1]).parent)
            time.sleep(0.01)

threads = [threading.Thread(target=take, args=(f"{sys.argv[3]} {n}",)) for n in range(3)]
threading.excepthook = lambda failed: (print(failed.exc_value, flush=True), sys.stdout.flush())
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_launch_locks_of_several_threads_in_two_daemons_are_no_deadlock(tmp_path):
    """The kernel takes threads of two processes that wait for each other's locks for one, if they wait inside it."""
    locks = [str(tmp_path / name) for name in ("a", "b")]
    daemons = [
        subprocess.Popen([sys.executable, "-c", TAKE_TURNS, *locks, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    assert [(daemon.communicate(timeout=200)[0], daemon.returncode) for daemon in daemons] == [("", 0)] * 2
