"""The real trainer in jobs that the launcher makes: warned, terminated, orphaned, and without its database."""

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from model.files import read_json, read_jsonl
from tests.dagster_server import wait_for
from tests.postgres import PostgresServer
from tests.rqwen3_pipeline.cluster_site import OWN, ServedSite
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster.daemons import processes_with

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
AWAY_S = 60
NEVER = 10_000_000
MONITOR_S = 15


def train_for_ever(site: ServedSite) -> None:
    """Let the profile's training be one that nothing but a signal ends or saves."""
    profile = site.site.profile
    text = profile.read_text()
    for key in ("max_steps", "save_every_steps", "eval_every_steps", "sample_every_steps"):
        text = re.sub(rf"^{key} = .*$", f"{key} = {NEVER}", text, flags=re.MULTILINE)
    profile.write_text(text)


class Training:
    """The next submission of the site's experiment, launched and under way."""

    def __init__(self, server: ServedSite) -> None:
        self._server, self.folder = server, server.site.home / "experiments" / "tiny"
        self._before = len(self.ledger())
        number = 1 + sum(record["exit_code"] in (0, 75) for record in self.ledger())
        self.run = server.launch("train_submission", partition=f"tiny.{number:02d}", location=OWN)
        wait_for(lambda: self._begun(number), f"steps of submission {number}")
        self.job = server.job_id(self.run)

    def ledger(self) -> list[dict]:
        """What the trainer wrote of all submissions."""
        path = self.folder / "ledger.jsonl"
        return read_jsonl(path) if path.exists() else []

    def last_step(self) -> int:
        """The last step that was logged."""
        return [line["step"] for line in read_jsonl(self.folder / "metrics.jsonl") if line["kind"] == "train"][-1]

    def trainer(self) -> psutil.Process:
        """The trainer's process."""
        return psutil.Process(read_json(self.folder / "LOCK")["pid"])

    def saved(self, *reasons: str) -> None:
        """The submission stopped for one of these reasons, and saved its last step, and nothing is left of the job."""
        wait_for(lambda: len(self.ledger()) > self._before, "the ledger's record")
        record = self.ledger()[-1]
        seen = (record["exit_code"], record["lost_steps"], record["job_id"])
        assert seen == (75, 0, self.job), record
        assert record["stop_reason"] in reasons
        assert (self.folder / "checkpoints" / f"step_{record['saved_step']}.json").exists()
        self._server.ended_job(self.run)
        wait_for(lambda: not processes_with("SLURM_JOB_ID", self.job), "the job's processes to be gone")

    def _begun(self, number: int) -> bool:
        assert self._server.run(self.run)["status"] not in ("FAILURE", "CANCELED"), self._server.story(self.run)
        path = self.folder / "metrics.jsonl"
        lines = read_jsonl(path) if path.exists() else []
        return any(line["kind"] == "train" and line["submission"] == number for line in lines)


@pytest.fixture
def server(served_site: ServedSite) -> ServedSite:
    train_for_ever(served_site)
    return served_site


def test_warned_trainer_saves_and_its_run_is_a_success(server, slurm_with_accounting):
    training = Training(server)
    slurm_with_accounting.run("scancel", "--signal=USR1", "--batch", training.job)
    server.wait(training.run, "SUCCESS")
    training.saved("stop_file")
    assert server.ended_job(training.run)["JobState"] == "COMPLETED"


def test_terminated_training_is_cancelled_after_its_save(server):
    training = Training(server)
    assert server.terminate(training.run) == "TerminateRunSuccess"
    server.wait(training.run, "CANCELED")
    training.saved("stop_file")
    assert server.ended_job(training.run)["JobState"] != "RUNNING"


def test_cancelled_training_saves_when_slurm_ends_it(server, slurm_with_accounting):
    training = Training(server)
    slurm_with_accounting.run("scancel", training.job)
    server.wait(training.run, "FAILURE")
    training.saved("SIGTERM", "stop_file")


def test_worker_killed_fails_the_run_while_its_trainer_saves(server):
    training = Training(server)
    trainer = training.trainer()
    worker = trainer.parent()
    worker.kill()
    began = time.monotonic()
    server.wait(training.run, "FAILURE")
    assert time.monotonic() - began < 3 * MONITOR_S
    training.saved("parent_gone", "stop_file", "SIGTERM")
    assert not trainer.is_running()


@pytest.fixture
def with_postgres(slurm: SlurmCluster) -> Iterator[tuple[ServedSite, PostgresServer]]:
    """A site of its own whose events are in Postgres."""
    folder = Path(tempfile.mkdtemp(prefix="site-"))
    folder.chmod(0o755)
    with (
        PostgresServer(folder / "postgres") as database,
        ServedSite(folder, slurm, RQWEN3_POSTGRES_URL=database.url) as site,
    ):
        train_for_ever(site)
        yield site, database
    slurm.cancel_all()
    shutil.rmtree(folder)


def test_training_goes_on_without_its_database_and_is_told_of_afterwards(with_postgres, slurm):
    server, database = with_postgres
    training = Training(server)
    trainer, before = training.trainer().pid, training.last_step()
    database.stop()
    time.sleep(AWAY_S)
    database.start()
    assert training.trainer().pid == trainer
    assert training.last_step() > before
    wait_for(lambda: _status(server, training.run) == "STARTED", "the run's status")
    slurm.run("scancel", "--signal=USR1", "--batch", training.job)
    server.wait(training.run, "SUCCESS")
    training.saved("stop_file")


def _status(server: ServedSite, run: str) -> str | None:
    try:
        return server.run(run)["status"]
    except (OSError, AssertionError):
        return None  # the webserver has not noticed yet that the database is back
