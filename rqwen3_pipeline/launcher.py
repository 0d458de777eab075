"""One Dagster run is one SLURM job: `SlurmRunLauncher` submits, watches and cancels it.

The job is found by a name that follows from the run, so nothing is lost with a process that dies, and
nothing is sent twice: after any doubt SLURM is asked for the name first. While SLURM does not answer
a run is never called dead, a launch goes back to the queue, and a cancellation is left to the
reconciler. A launch costs one sbatch; a poll of any number of runs one squeue.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import dagster as dg
from dagster import DagsterRunStatus
from dagster._config import Field, IntSource, Noneable, StringSource
from dagster._core.errors import DagsterLaunchFailedError, DagsterUserCodeUnreachableError
from dagster._core.events import EngineEventData
from dagster._core.launcher import CheckRunHealthResult, DefaultRunLauncher, LaunchRunContext, RunLauncher, WorkerStatus
from dagster._core.storage.dagster_run import DagsterRun
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import ConfigurableClass
from dagster._serdes.config_class import ConfigurableClassData

from model.errors import ConfigError, EnvironmentProblem
from model.files import try_lock, write_text
from rqwen3_pipeline.programs import tail
from rqwen3_pipeline.settings import shipped
from rqwen3_pipeline.slurm import reconcile
from rqwen3_pipeline.slurm.client import Job, Slurm, SlurmError, SlurmRejected, SlurmUnavailable, SlurmUnclear
from rqwen3_pipeline.slurm.cluster import (
    BOOKKEEPING,
    LOCAL,
    PREFIX,
    SAVE,
    STOP,
    WAITS,
    WHERE,
    Cluster,
    Wish,
    load_cluster,
    wish,
)
from rqwen3_pipeline.slurm.run_job import JobFiles, Place, job_options, job_script
from rqwen3_pipeline.slurm.script import CANCEL
from rqwen3_pipeline.slurm.states import Phase

JOB_ID, ATTEMPT, CANCEL_REQUESTED = f"{PREFIX}job_id", f"{PREFIX}attempt", f"{PREFIX}cancel_requested"
ENDED = f"{PREFIX}ended"
"""Tag of a failed run that has been told how SLURM ended its job."""
LOOK_TRIES, LOOK_PAUSE_S = 4, 5.0
LOCK_PAUSE_S = 0.1
ONE_POLL_S = 10.0
"""How long one squeue answers: all runs of a poll, which comes every 15 s, share it."""
COMPLETED_GRACE_S = 60.0
"""How long a run may stay started after its job has ended well: its last events may be on their way."""


def _wait_for_lock(file: IO[str], folder: Path) -> None:
    """Take the lock of a file in `folder`, asking again and again.

    A call that waits inside the kernel may end with EDEADLK: daemons launch several runs at once from
    threads, and the kernel, which knows only processes, sees two of them wait for each other.
    """
    while not try_lock(file, folder):
        time.sleep(LOCK_PAUSE_S)


class SlurmRunLauncher(RunLauncher[Any], ConfigurableClass):
    """Launches runs as SLURM jobs, or, by the tag `slurm/where: local`, on this host as Dagster does by default."""

    def __init__(
        self,
        home: str,
        cluster: str | None = None,
        profile: str | None = None,
        timeout_seconds: int = WAITS["timeout_seconds"],
        missing_grace_seconds: int = WAITS["missing_grace_seconds"],
        save_budget_seconds: int = WAITS["save_budget_seconds"],
        inst_data: ConfigurableClassData | None = None,
        slurm: Slurm | None = None,
    ) -> None:
        """Make a launcher; `slurm` stands in for the real one in tests."""
        super().__init__()
        self.home = Path(home)
        self.patience = reconcile.Patience(missing_s=missing_grace_seconds, save_s=save_budget_seconds)
        self.slurm = slurm or Slurm(timeout_s=timeout_seconds, cache_s=ONE_POLL_S)
        self._cluster, self._profile = cluster, Path(profile) if profile else None
        self._inst_data = inst_data
        self._local = DefaultRunLauncher()
        self._missing_since: dict[str, float] = {}
        self._ended_since: dict[str, float] = {}

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        """As Dagster keeps it."""
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """The keys of `run_launcher: config` in dagster.yaml."""
        return {
            "home": Field(StringSource, description="The run root."),
            "cluster": Field(Noneable(StringSource), is_required=False, description="The site's TOML file."),
            "profile": Field(Noneable(StringSource), is_required=False, description="The run's TOML file."),
            **{key: Field(IntSource, is_required=False, default_value=value) for key, value in WAITS.items()},
        }

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        """Made by Dagster from dagster.yaml."""
        return cls(inst_data=inst_data, **config_value)

    def register_instance(self, instance: dg.DagsterInstance) -> None:
        """Dagster's instance, for this launcher and the one for local runs."""
        super().register_instance(instance)
        self._local.register_instance(instance)

    def files(self, run: DagsterRun) -> JobFiles:
        """The files of a run's newest attempt."""
        folder = self.home / "dagster" / "slurm" / run.run_id
        return JobFiles(folder=folder, attempt=int(run.tags.get(ATTEMPT) or 1))

    # Launching

    def launch_run(self, context: LaunchRunContext) -> None:
        """Submit the run's job, or adopt the one that an earlier try has left.

        Raises:
            DagsterUserCodeUnreachableError: SLURM does not answer, or the lock server; the queue tries again.
            DagsterLaunchFailedError: the tags are not valid, there is no sbatch, or SLURM refused, with its words.
        """
        run = context.dagster_run
        try:
            wanted = wish(self._step_tags(run), run.tags, self.site())
            if not wanted.local:
                with self._one_by_one(run) as waiting:
                    if waiting is not None:
                        self._launch(waiting, wanted)
        except (SlurmUnavailable, EnvironmentProblem) as error:
            raise DagsterUserCodeUnreachableError(f"The run goes back to the queue. {error}") from error
        except (ConfigError, SlurmError) as error:
            where = self._cluster or "no site file; set RQWEN3_CLUSTER"
            way_out = f"What jobs ask for stands in {where}, or in tags slurm/…. What to mend there says: rqwen3 doctor"
            message = f"The run was not submitted to SLURM. {str(error).rstrip('.')}. {way_out}"
            self._instance.report_run_failed(run, message)  # the queue would fail it without a word
            raise DagsterLaunchFailedError(message) from error
        if wanted.local:
            self._instance.add_run_tags(run.run_id, {f"{PREFIX}{WHERE}": LOCAL})
            self._local.launch_run(context)

    @contextlib.contextmanager
    def _one_by_one(self, run: DagsterRun) -> Iterator[DagsterRun | None]:
        """Keep a second daemon's launch of the same run waiting; gives the run as it is then, None if it has begun."""
        folder = self.files(run).folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "launch.lock").open("w") as file:
            _wait_for_lock(file, folder)
            now = self._instance.get_run_by_id(run.run_id) or run
            yield now if now.status == DagsterRunStatus.STARTING else None

    def _launch(self, run: DagsterRun, wanted: Wish) -> None:
        attempt = int(run.tags.get(ATTEMPT) or 0)
        if attempt:
            before = self.slurm.find(reconcile.job_name(run.run_id, attempt))
            alive = [job for job in before if not job.phase.ended]
            if alive and run.tags.get(JOB_ID) == str(alive[0].job_id):
                return  # another daemon has launched it
            if alive and alive[0].phase is not Phase.PENDING:
                # Its worker may have found the run in the queue, and left it alone: the next look will tell.
                raise SlurmUnavailable(f"{alive[0].describe()}: a try before this one, which must end first.")
            if alive:
                self._note(run, alive[0].job_id, "found again")
                return
            attempt += bool(before)
        attempt = attempt or 1
        of_its_model = (f"{PREFIX}{key}" for key in BOOKKEEPING)  # tags of the run that this one was copied from
        stale = {tag: "" for tag in of_its_model if run.tags.get(tag)}
        tags = {**stale, ATTEMPT: str(attempt), **({f"{PREFIX}{STOP}": SAVE} if wanted.saves else {})}
        self._instance.add_run_tags(run.run_id, tags)
        files = JobFiles(folder=self.files(run).folder, attempt=attempt)
        options = job_options(run.run_id, wanted, files)
        script = job_script(self._worker(run), options, files, self._place())
        write_text(files.script, script)
        try:
            job_id = self.slurm.submit(options, script)
        except (SlurmUnavailable, SlurmUnclear) as error:
            job_id = self._look_for(options.job_name, error)
        self._note(run, job_id, "submitted", files)

    def _worker(self, run: DagsterRun) -> Sequence[str]:
        """The command that executes the run."""
        if run.job_code_origin is None:
            raise ConfigError("the run does not say which code it is of; launch it from the UI or the daemon.")
        return ExecuteRunArgs(
            job_origin=run.job_code_origin,
            run_id=run.run_id,
            instance_ref=self._instance.get_ref(),
            set_exit_code_on_failure=True,  # a failed run is a failed job
        ).get_command_args()

    def _place(self) -> Place:
        return Place(
            home=self.home,
            profile=self._profile,
            env_file=self.site().env_file or shipped("sbatch/env.sh"),
            save_budget_s=int(self.patience.save_s),
        )

    def _look_for(self, name: str, doubt: SlurmError) -> int:
        """The id of a job that sbatch may have left, though it said nothing of it.

        Raises:
            SlurmUnavailable: SLURM has no such job, or does not answer: to be tried again.
            SlurmRejected: sbatch claimed to have ended well, and SLURM has no such job.
        """
        for attempt in range(LOOK_TRIES):
            time.sleep(LOOK_PAUSE_S if attempt else 0.0)
            try:
                found = self.slurm.find(name)
            except SlurmError:
                continue
            if found:
                return found[0].job_id
        if isinstance(doubt, SlurmUnclear):
            raise SlurmRejected(f"{doubt} SLURM has no job of that name, so nothing was sent a second time.") from doubt
        raise doubt

    def _note(self, run: DagsterRun, job_id: int, how: str, files: JobFiles | None = None) -> None:
        self._instance.add_run_tags(run.run_id, {JOB_ID: str(job_id)})
        files = files or self.files(run)
        self._instance.report_engine_event(
            f"SLURM job {job_id} {how}.",
            run,
            EngineEventData({"job": dg.MetadataValue.int(job_id), "log": str(files.log), "script": str(files.script)}),
        )

    def _step_tags(self, run: DagsterRun) -> list[Mapping[str, str]]:
        plan_id = run.execution_plan_snapshot_id
        if plan_id is None:
            return []
        plan = self._instance.get_execution_plan_snapshot(plan_id)
        wanted = set(run.step_keys_to_execute or plan.step_keys_to_execute)
        return [step.tags or {} for step in plan.steps if step.key in wanted]

    def site(self) -> Cluster:
        """What the site's file says.

        Raises:
            ConfigError: it can't be read, or holds something that is not valid.
        """
        return load_cluster(Path(self._cluster)) if self._cluster else Cluster()

    # Watching

    def is_local(self, run: DagsterRun) -> bool:
        """Whether the run was launched on this host."""
        return run.tags.get(f"{PREFIX}{WHERE}") == LOCAL

    def job_of(self, run: DagsterRun) -> Job | None:
        """The run's job as SLURM knows it now; None when it knows of none.

        Raises:
            SlurmError: SLURM does not answer, or not sensibly.
        """
        noted = int(run.tags[JOB_ID]) if run.tags.get(JOB_ID, "").isdigit() else None
        facts = reconcile.Run(
            run_id=run.run_id, status=run.status.value, job_id=noted, saves=False, cancel_requested=None, ended=None
        )
        job = reconcile.pick(facts, self.slurm.jobs())
        if job is not None and not job.phase.ended:
            return job
        asked = job.job_id if job is not None else noted
        known = self.slurm.job(asked) if asked is not None else None
        return known if known is not None and reconcile.belongs(known, run.run_id) else job

    @property
    def supports_check_run_worker_health(self) -> bool:
        """It does."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Whether a started run's job lives. Unreachable, and any doubt, means that it runs."""
        if self.is_local(run):
            return CheckRunHealthResult(WorkerStatus.RUNNING, "runs on the daemon's host")
        try:
            job = self.job_of(run)
        except SlurmError as error:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"taken to be running. {error}")
        now = time.time()
        if job is None:
            missing_s = now - self._missing_since.setdefault(run.run_id, now)
            if missing_s < self.patience.missing_s:
                return CheckRunHealthResult(WorkerStatus.RUNNING, f"SLURM has not listed its job for {missing_s:.0f} s")
            why = f"SLURM no longer knows job {run.tags.get(JOB_ID)}, looked for over {missing_s:.0f} s"
            return CheckRunHealthResult(WorkerStatus.FAILED, why)
        self._missing_since.pop(run.run_id, None)
        worker = str(job.job_id)
        if job.phase is Phase.FAILED:
            return CheckRunHealthResult(WorkerStatus.FAILED, job.describe(), run_worker_id=worker)
        if job.phase is Phase.SUCCEEDED:
            ended_s = now - (job.ended or self._ended_since.setdefault(run.run_id, now))
            if ended_s > COMPLETED_GRACE_S:
                why = f"the job ended well, and the run is still started {ended_s:.0f} s later. {job.describe()}"
                return CheckRunHealthResult(WorkerStatus.FAILED, why, run_worker_id=worker)
        return CheckRunHealthResult(WorkerStatus.RUNNING, job.describe(), run_worker_id=worker)

    def get_run_worker_debug_info(self, run: DagsterRun, include_container_logs: bool | None = True) -> str | None:
        """What SLURM says of the run's job, and the end of its log, for the UI."""
        if self.is_local(run):
            return None
        try:
            job = self.job_of(run)
            said = job.describe() if job is not None else "SLURM knows no job of this run."
        except SlurmError as error:
            said = str(error)
        return f"{said}\n{self.log_tail(run)}"

    def log_tail(self, run: DagsterRun) -> str:
        """The last lines of the job's log, with its path."""
        log = self.files(run).log
        try:
            return f"The end of {log}:\n{tail(log)}"
        except OSError:
            return f"{log}: not there; the job has printed nothing, or its host does not share this folder."

    # Ending

    def terminate(self, run_id: str) -> bool:
        """End a run: a training job saves first, any other is cancelled at once.

        Returns:
            Whether the end is under way. While SLURM does not answer the wish is noted on the run, which
            stays as it is; the reconciler carries it out.
        """
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        if self.is_local(run):
            return self._local.terminate(run_id)
        try:
            job = self.job_of(run)
        except SlurmError as error:
            self._instance.add_run_tags(run_id, {CANCEL_REQUESTED: f"{time.time():.0f}"})
            self._instance.report_engine_event(
                f"SLURM can't be asked to end the job now; that is done as soon as it answers. {error}", run
            )
            return False
        self._instance.add_run_tags(run_id, {CANCEL_REQUESTED: f"{time.time():.0f}"})
        if job is None or job.phase.ended:
            why = "There was no job to end." if job is None else job.describe()
            self._instance.report_run_canceled(run, why)
        elif self.saves(run) and job.phase is Phase.RUNNING:
            self.ask_to_save(run, f"{job.describe()}.")
        else:
            self._report_canceling(run, f"Cancelling {job.describe()}.")
            self._cancel(run, job)
        return True

    def saves(self, run: DagsterRun) -> bool:
        """Whether the run's job saves when it is told to stop."""
        return run.tags.get(f"{PREFIX}{STOP}") == SAVE

    def ask_to_save(self, run: DagsterRun, why: str) -> None:
        """Tell a training job to save, stop and end its run; the reconciler ends it if that takes too long."""
        wait = f"It is told to save and stop, and cancelled if that takes more than {self.patience.save_s:.0f} s."
        self._report_canceling(run, f"{why} {wait}")
        write_text(self.files(run).stop, CANCEL)

    def _report_canceling(self, run: DagsterRun, message: str) -> None:
        if run.status != DagsterRunStatus.CANCELING:
            self._instance.report_run_canceling(run, message)

    def _cancel(self, run: DagsterRun, job: Job) -> None:
        try:
            self.slurm.cancel(job.job_id)
        except SlurmError as error:
            self._instance.report_engine_event(f"scancel will be tried again. {error}", run)

    # The rest is for local runs.

    def join(self, timeout: int = 30) -> None:
        """Wait for local runs."""
        self._local.join(timeout)

    def dispose(self) -> None:
        """Let go of local runs."""
        self._local.dispose()
