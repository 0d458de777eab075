"""The daemon's heartbeat and SLURM's queue in the status: read beside Dagster, which is the oracle here."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import dagster as dg
import pytest
from dagster._daemon.types import DaemonHeartbeat

from rqwen3_pipeline import settings
from rqwen3_pipeline.instance import open_instance, render_home
from rqwen3_pipeline.services import render_services, services
from rqwen3_pipeline.settings import RunRoot, Settings
from tests.postgres import PostgresServer
from tests.rqwen3_pipeline.slurm.fake import programs
from tests.rqwen3_pipeline.slurm.test_parsing import record


def waiting(reason: str, ago_s: float) -> dict[str, str]:
    """An answer of squeue with a job that was submitted so long ago."""
    text = record(state="PENDING", comment="dagster:0123456789", name="dg-01234567-1").replace("None", reason)
    submitted = datetime.fromtimestamp(time.time() - ago_s).isoformat(timespec="seconds")
    return {"out": text.replace("2026-03-01T10:00:00", submitted)}


@pytest.fixture
def root(tmp_path, monkeypatch) -> RunRoot:
    monkeypatch.setenv("RQWEN3_HOME", str(tmp_path / "home"))
    return RunRoot(tmp_path / "home")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the user of a Postgres server may enter, who is not root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def beat(instance: dg.DagsterInstance, name: str, ago_s: float) -> None:
    instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - ago_s, name, "me"))


def look(root: RunRoot) -> str:
    return "\n".join(render_services(services(root, Settings())))


def test_services_of_a_root_without_an_instance_are_not_asked(root):
    assert services(root, Settings()) == {"daemon": None, "slurm": None}
    assert look(root) == ""


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_services_tell_how_long_ago_the_daemon_was_heard_of(root, open_folder, monkeypatch, store):
    with contextlib.ExitStack() as stack:
        if store == "postgres":
            monkeypatch.setenv("RQWEN3_POSTGRES_URL", stack.enter_context(PostgresServer(open_folder / "pg")).url)
        with open_instance(root) as instance:
            assert "never ran here; start it: rqwen3 up" in look(root)
            beat(instance, "SENSOR", 10)
            beat(instance, "MONITORING", 7000)
            found = services(root, Settings())["daemon"]
            assert 9 < found["age_s"] < 100
            assert found["stale"] == ["MONITORING"]
            assert "silent: MONITORING" in look(root)
            beat(instance, "SENSOR", 7000)
            assert "117 min ago: it is down; start it: rqwen3 up" in look(root)
    if store == "postgres":
        assert "can't be told: the event store does not answer" in look(root)


def test_services_with_a_damaged_event_store_say_so(root):
    with open_instance(root):
        pass
    (root.dagster_home / "storage/history/runs.db").write_bytes(b"no database, but long enough to be read as one" * 99)
    assert "whether it lives can't be told" in look(root)


def test_services_without_the_packages_of_postgres_name_the_command_that_brings_them(root, monkeypatch):
    monkeypatch.setenv("RQWEN3_POSTGRES_URL", "postgresql://me:secret@db/x")
    render_home(root)
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert "make install-cluster" in look(root)


def test_services_tell_place_and_reason_of_what_waits_and_that_slurm_is_away(root, tmp_path, monkeypatch):
    monkeypatch.setenv("RQWEN3_LAUNCHER", "slurm")
    with open_instance(root):
        pass
    for answer, words in (
        (waiting("Priority", 3 * 86400), "job 7 of run 01234567 waits for 3.0 days, cpu, Priority"),
        (waiting("JobHeldUser", 5 * 3600), "waits for 5 h, cpu, JobHeldUser"),
        (waiting("PartitionTimeLimit", 6 * 3600), "for 6 h, cpu, PartitionTimeLimit, which never clears: scancel 7"),
        ({"out": ""}, "no job of this pipeline waits"),
    ):
        programs(tmp_path / "bin", squeue=answer)
        assert words in look(root)
        assert ("never clears" in look(root)) == ("never clears" in words)
    away = {"err": "squeue: error: Unable to contact slurm controller (connect failure)\n", "rc": 1}
    programs(tmp_path / "bin", squeue=away)
    assert "queue: squeue: SLURM does not answer" in look(root)
