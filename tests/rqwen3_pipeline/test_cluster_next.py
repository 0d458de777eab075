"""The next step where runs are SLURM jobs, over a real instance, from the empty run root to the report."""

import json
import time
from datetime import UTC, datetime

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData
from dagster._core.test_utils import create_run_for_test
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._daemon.types import DaemonHeartbeat

from model.files import write_json
from rqwen3_pipeline.cluster_next import next_on_cluster
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.evidence.report import write_report
from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.instance import open_instance
from rqwen3_pipeline.services import services
from rqwen3_pipeline.settings import Settings
from rqwen3_pipeline.status import render, status
from tests.rqwen3_pipeline.site import make_site
from tests.rqwen3_pipeline.slurm.fake import programs


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("RQWEN3_LAUNCHER", "slurm")
    monkeypatch.setenv("DAGSTER_HOME", "")
    programs(tmp_path / "bin", squeue={"out": ""})


def served(sample, ago_s: float = 0.0) -> dg.DagsterInstance:
    """The instance of a run root whose daemon was heard of then."""
    instance = open_instance(sample.root)
    instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - ago_s, "SENSOR", "me", []))
    return instance


def look(sample) -> dict:
    settings = Settings(profile=str(sample.config_path), home=sample.root.path)
    found = status(sample.root, sample.run, sample.config_path)
    found["services"] = services(sample.root, settings)
    step = next_on_cluster(found, settings)
    json.dumps(step)
    text = render(found | {"next": step}, "utf-8")
    program = f"rqwen3 --home {sample.root.path} --profile {sample.config_path}"
    step["command"] = step["command"] and step["command"].removeprefix(f"{program} ")
    assert step["command"] != "run"
    assert (f"next: {program} {step['command']}" if step["command"] else "next: ") in text
    return step


def turn_on(instance) -> None:
    """What the UI's switch of the sensor leaves in the instance."""
    location = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(module_name="rqwen3_pipeline.definitions"))
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "__repository__"), "resubmission")
    on = InstigatorStatus.RUNNING
    instance.add_instigator_state(InstigatorState(origin, InstigatorType.SENSOR, on, SensorInstigatorData()))


def green(sample) -> None:
    write_json(sample.folder / "preflight.json", {"passed": True})


def test_next_goes_from_the_lock_over_the_daemon_to_the_back_fill(empty_run):
    assert look(empty_run)["command"] == "sources lock"
    lock_folder(empty_run.root, corpus_config(empty_run.run), empty_run.sources)
    step = look(empty_run)
    assert step["command"] == "up"
    assert "no daemon runs" in step["why"]
    assert "Then rqwen3 backfill raw_files filtered_documents digests: 9 of these" in step["why"]
    with served(empty_run):
        assert look(empty_run)["command"] == "backfill raw_files filtered_documents digests"
    with served(empty_run, ago_s=7000):
        assert look(empty_run)["command"] == "up"


def test_next_while_a_back_fill_is_at_work_is_to_wait(empty_run):
    lock_folder(empty_run.root, corpus_config(empty_run.run), empty_run.sources)
    with served(empty_run) as instance:
        keys = frozenset({dg.AssetKey(["filtered_documents", "wikipedia"])})
        create_run_for_test(
            instance, status=DagsterRunStatus.STARTED, asset_selection=keys, tags={"slurm/job_id": "12"}
        )
        step = look(empty_run)
    assert (step["command"], step["in_ui"]) == (None, None)
    assert "filtered_documents/wikipedia (started, job 12)" in step["why"]


def test_next_goes_through_survivors_to_the_shards(corpus_run):
    with served(corpus_run):
        kept = {path: path.read_bytes() for path in corpus_run.root.path.glob("survivors/*/*")}
        kept[corpus_run.root.tokenizer] = corpus_run.root.tokenizer.read_bytes()
        for path in kept:
            path.unlink()
        assert look(corpus_run)["in_ui"] == "materialize survivors"
        tokenizer = kept.pop(corpus_run.root.tokenizer)
        for path, data in kept.items():
            path.write_bytes(data)
        assert look(corpus_run)["in_ui"] == "materialize tokenizer"
        corpus_run.root.tokenizer.write_bytes(tokenizer)
        next(corpus_run.root.tokens.glob("*/*")).unlink()
        assert look(corpus_run)["command"] == "backfill token_shards"


def test_next_after_the_shards_is_the_manifest_then_preflight_then_the_sensor(corpus_run):
    manifest = corpus_run.root.manifest.read_bytes()
    corpus_run.root.manifest.unlink()
    with served(corpus_run) as instance:
        assert look(corpus_run)["in_ui"] == "materialize manifest"
        corpus_run.root.manifest.write_bytes(manifest)
        assert look(corpus_run)["in_ui"] == "materialize preflight"
        green(corpus_run)
        step = look(corpus_run)
        assert step["in_ui"] == "turn on the sensor resubmission"
        assert "small.01" in step["why"]
        turn_on(instance)
        step = look(corpus_run)
        assert (step["command"], step["in_ui"]) == (None, None)
        assert "submits small.01 at its next tick" in step["why"]


def test_next_between_slices_in_a_back_off_and_after_a_stop_by_hand(corpus_run):
    green(corpus_run)
    corpus_run.begin()
    corpus_run.end(1, 0, 80, 80, "deadline", 75)
    corpus_run.save(80)
    with served(corpus_run) as instance:
        turn_on(instance)
        assert "submits small.02 at its next tick" in look(corpus_run)["why"]
        now = datetime.now(UTC).isoformat()
        corpus_run.end(2, 80, 100, 80, "killed", 137, ended=now)
        step = look(corpus_run)
        assert step["command"] is None
        assert "small.02 was lost" in step["why"]
        assert "its next attempt is in" in step["why"]
        control.stop(corpus_run.root, "small", "lunch")
        step = look(corpus_run)
        assert step["command"] == "experiment resume small"
        assert "stopped by hand" in step["why"]
        assert "lunch" in step["why"]


def test_next_after_a_failure_says_what_to_mend_before_the_command(corpus_run):
    green(corpus_run)
    corpus_run.end(1, 0, 10, 0, "disk_full", 74)
    with served(corpus_run):
        step = look(corpus_run)
    assert step["command"] == "experiment resume small"
    assert "Free space" in step["why"]
    assert "that first, then this command" in step["why"]


def test_next_after_the_last_step_is_the_report_and_then_nothing(finished_run):
    with served(finished_run):
        assert look(finished_run)["in_ui"] == "launch the job report_results"
        write_report(finished_run.root, finished_run.run)
        step = look(finished_run)
        assert step["command"] is None
        assert step["why"].startswith("all is done")


def test_next_where_the_event_store_can_not_be_read_says_so(corpus_run):
    with served(corpus_run):
        pass
    (corpus_run.root.dagster_home / "storage/history/runs.db").write_bytes(b"no database, yet long enough" * 99)
    assert "can't be told" in look(corpus_run)["why"]


def test_status_command_names_the_clusters_own_step_where_runs_are_jobs(tmp_path):
    site = make_site(tmp_path)
    for launcher, command in (("slurm", "sources lock"), ("local", "run")):
        told = site.rqwen3("status", "--json", RQWEN3_LAUNCHER=launcher)
        assert told.returncode == 0, told.stderr
        step = json.loads(told.stdout)["next"]
        assert step["command"] == f"rqwen3 --home '{site.home}' --profile {site.profile} {command}"
