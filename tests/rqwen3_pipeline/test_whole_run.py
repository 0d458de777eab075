"""`rqwen3 run` from source files to the evidence report: once, again, beside itself, and on bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest

from model.files import hold_lock, read_json, sha256_file
from rqwen3_pipeline.settings import SOURCES
from tests.rqwen3_pipeline.site import PROFILE, Site, hashes, make_site


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Site:
    site = make_site(tmp_path_factory.mktemp("finished"))
    done = site.run()
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def fresh(tmp_path) -> Site:
    return make_site(tmp_path)


def test_run_from_sources_to_report_leaves_what_the_design_names(finished):
    names = {path.relative_to(finished.home).as_posix() for path in finished.home.rglob("*")}
    assert {
        "sources.lock.json",
        "manifest.json",
        "experiments/tiny/checkpoints/final.pt",
        "experiments/tiny/ledger.jsonl",
        "experiments/tiny/config.toml",
        "exports/tiny/model.safetensors",
        "evaluations/tiny/scores.json",
        "evidence/tiny/index.html",
        "evidence/tiny/evidence.json",
        "evidence/tiny/loss.csv",
    } <= names
    assert not [name for name in names if name.endswith(".tmp")]


def test_shards_agree_with_the_manifest_by_sha256sum(finished):
    manifest = read_json(finished.home / "manifest.json")
    for shard in [*manifest["shards"], *manifest["heldout"]]:
        path = finished.home / shard["path"]
        assert path.stat().st_size == 4 * shard["tokens"]
        printed = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout
        assert printed.split()[0].lstrip("\\") == shard["sha256"]


def test_card_of_the_export_shows_the_scores_and_its_record_agrees(finished):
    folder = finished.home / "exports" / "tiny"
    assert "| heldout_cloze | accuracy |" in (folder / "README.md").read_text(encoding="utf-8")
    files = read_json(folder / "export.json")["files"]
    assert {name: sha256_file(folder / name) for name in files} == {n: entry["sha256"] for n, entry in files.items()}


def test_run_again_does_nothing(finished):
    before = hashes(finished.home)
    again = finished.run()
    assert again.returncode == 0, again.stderr
    stages = again.stdout.splitlines()[1:-4]
    assert len(stages) >= 9
    assert all("already done" in line for line in stages), again.stdout
    assert hashes(finished.home) == before


def test_run_with_other_sources_after_the_training_is_refused_and_replaces_nothing(finished, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished.sources, other)
    rows = pq.read_table(other / "pes2o.parquet")
    pq.write_table(rows.slice(1), other / "pes2o.parquet")
    names = ("manifest.json", "sources.lock.json", "raw/origin.json")
    before = [(finished.home / name).read_bytes() for name in names]
    done = finished.rqwen3("run", "--sources", str(other))
    assert done.returncode != 0
    assert "has been trained on them. Another corpus goes into a run root of its own" in done.stderr
    assert [(finished.home / name).read_bytes() for name in names] == before
    assert "already done" in finished.run().stdout


def test_every_asset_and_partition_is_materialized_in_dagster(finished):
    with dg.DagsterInstance.from_config(str(finished.home / "dagster")) as instance:
        for source in SOURCES:
            keys = {f["key"] for f in read_json(finished.home / "sources.lock.json")["sources"][source]["files"]}
            for asset in ("raw_files", "filtered_documents", "digests", "token_shards"):
                assert instance.get_materialized_partitions(dg.AssetKey([asset, source])) == keys
        assert instance.get_materialized_partitions(dg.AssetKey("submissions")) == {"tiny.01"}
        event = instance.get_latest_materialization_event(dg.AssetKey(["evidence_report"]))
        assert event is not None
        runs = instance.get_runs()
        assert {run.status.value for run in runs} == {"SUCCESS"}


def test_partition_metadata_holds_its_own_funnel(finished):
    with dg.DagsterInstance.from_config(str(finished.home / "dagster")) as instance:
        key = dg.AssetKey(["filtered_documents", "wikipedia"])
        found = instance.fetch_materializations(key, limit=10).records
        (record,) = [record for record in found if record.partition_key == "00000"]
        values = record.asset_materialization.metadata
        reasons = {row.data["reason"]: row.data["documents"] for row in values["funnel"].value.records}
        assert reasons["kept"] == values["kept"].value
        assert sum(reasons.values()) == values["rows"].value == 40
        assert reasons["disambiguation"] == 1


def test_status_as_json_says_that_the_run_is_finished(finished):
    found = json.loads(finished.rqwen3("status", "--json").stdout)
    assert found["experiments"]["tiny"]["steps_saved"] == 30
    assert found["experiments"]["tiny"]["max_steps"] == 30
    shown = finished.rqwen3("status")
    assert shown.returncode == 0
    assert "tiny" in shown.stdout


def test_corpus_built_again_by_other_workers_has_the_same_manifest(finished, tmp_path):
    other = Site(finished.folder)
    other.home = tmp_path / "other root"
    command = other.command("corpus", "build", "--sources", str(other.sources))
    command[command.index("--workers") + 1] = "3"
    subprocess.run(command, check=True, capture_output=True)
    assert (other.home / "manifest.json").read_bytes() == (finished.home / "manifest.json").read_bytes()


def test_trace_prints_the_documents_of_a_sequence(finished):
    printed = finished.rqwen3("trace", "--step", "1", "--sequence", "0")
    assert printed.returncode == 0, printed.stderr
    documents = [json.loads(line) for line in printed.stdout.splitlines()]
    assert documents
    assert {document["source"] for document in documents} <= set(SOURCES)


def test_generate_continues_the_prompt(finished):
    printed = finished.rqwen3("generate", "--prompt", "water light", "--new-tokens", "4")
    assert printed.returncode == 0, printed.stderr
    assert "water light" in printed.stdout


def test_second_copy_in_one_run_root_is_refused_with_the_holder(fresh):
    with hold_lock(fresh.home / ".run.lock", "a test"):
        refused = fresh.run()
    assert refused.returncode == 73
    assert f"a test (host {os.uname().nodename}, process {os.getpid()})" in refused.stderr


def test_orphaned_dagster_run_of_a_dead_process_is_failed_and_the_stage_made_up(fresh):
    from rqwen3_pipeline.instance import OWNER_TAG, fail_orphans, open_instance, owner
    from rqwen3_pipeline.settings import RunRoot

    instance = open_instance(RunRoot(fresh.home))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host, boot, pid, start = owner().split("/")

    def begun(*holder: object) -> str:
        tags = {OWNER_TAG: "/".join(map(str, holder))}
        return instance.add_run(dg.DagsterRun("job", status=dg.DagsterRunStatus.STARTED, tags=tags)).run_id

    gone = {
        begun(host, boot, dead.pid, start),
        begun(host, boot, pid, int(start) - 1),
        begun(host, "other", pid, start),
    }
    alive = {begun(host, boot, pid, start), begun(f"other-{host}", boot, dead.pid, start)}
    assert set(fail_orphans(instance)) == gone
    assert {instance.get_run_by_id(run).status for run in gone} == {dg.DagsterRunStatus.FAILURE}
    assert {instance.get_run_by_id(run).status for run in alive} == {dg.DagsterRunStatus.STARTED}


def one_sentence(refused: subprocess.CompletedProcess[str]) -> str:
    assert refused.returncode not in (0, 73)
    assert "Traceback" not in refused.stderr
    return refused.stderr


def test_corpus_too_small_for_the_run_is_refused_each_time_until_the_configuration_wants_less(fresh):
    fresh.profile.write_text(PROFILE.replace("max_steps = 30", "max_steps = 3000"))
    for _ in range(2):
        assert "tokens, the corpus has" in one_sentence(fresh.run())
    assert not list(fresh.home.glob("experiments/*/ledger.jsonl"))
    fresh.profile.write_text(PROFILE.replace("vocab_size = 400", "vocab_size = 390", 1))
    assert "made with vocab_size = 400, now vocab_size = 390" in one_sentence(fresh.run())
    fresh.profile.write_text(PROFILE)
    done = fresh.run()
    assert done.returncode == 0, done.stderr
    wanted = sum(facts["budget_tokens"] for facts in read_json(fresh.home / "manifest.json")["sources"].values())
    assert wanted < 3000 * 4 * 32


def test_column_missing_in_a_sample_file_is_named_and_nothing_is_locked(fresh):
    path = fresh.sources / "pes2o.parquet"
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["text"]), path)
    error = one_sentence(fresh.run())
    assert "pes2o.parquet" in error
    assert "content" in error
    assert not (fresh.home / "sources.lock.json").exists()


def test_sample_file_truncated_is_named_and_nothing_is_locked(fresh):
    path = fresh.sources / "wikipedia.parquet"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "wikipedia.parquet" in one_sentence(fresh.run())
    assert not (fresh.home / "sources.lock.json").exists()


def test_source_missing_in_the_folder_is_named(fresh):
    (fresh.sources / "textbooks.parquet").unlink()
    assert "textbooks" in one_sentence(fresh.run())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max_steps = 30", "max_step = 30", ["max_step", "max_steps", "warmup_steps"]),
        ("[evaluation]", "[evalution]", ["evalution", "evaluation"]),
        ("items = 12", "itmes = 12", ["itmes", "items", "choices"]),
        ("d_model = 16", 'd_model = "16"', ["model.d_model", "int"]),
        ("[model]", "[model", ["tiny.toml", "line"]),
        ("oracle_documents", "oracle_document", ["oracle_document", "oracle_documents"]),
    ],
)
def test_configuration_broken_names_the_key_and_the_valid_ones(fresh, old, new, expected):
    fresh.profile.write_text(PROFILE.replace(old, new, 1))
    error = one_sentence(fresh.run())
    for part in expected:
        assert part in error
    assert not fresh.home.exists()


def test_profile_unknown_lists_those_there_are(fresh):
    command = fresh.command("run")
    command[command.index("--profile") + 1] = "dmeo"
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "demo" in one_sentence(refused)


def test_workers_in_the_environment_not_a_number_is_refused_by_name(fresh):
    command = fresh.command("status")
    del command[command.index("--workers") : command.index("--workers") + 2]
    environment = {**os.environ, "RQWEN3_WORKERS": "many"}
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert refused.returncode == 2
    assert "RQWEN3_WORKERS" in one_sentence(refused)


def test_disk_too_full_is_refused_before_anything_is_written(fresh, monkeypatch):
    from model.errors import DiskSpaceError
    from rqwen3_pipeline.local_run import run_all
    from rqwen3_pipeline.settings import Settings

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(DiskSpaceError, match="RQWEN3_HOME"):
        run_all(Settings(profile=str(fresh.profile), home=fresh.home, sources=fresh.sources))
    assert not fresh.home.exists()


def test_second_ui_on_one_run_root_is_refused_with_the_holder(fresh):
    with hold_lock(fresh.home / "dagster" / ".up.lock", "rqwen3 up"):
        refused = fresh.rqwen3("up", "--port", "39517")
    assert refused.returncode == 73
    assert "in use by rqwen3 up (host" in refused.stderr


def test_generate_without_a_model_or_a_folder_says_what_is_missing(fresh, tmp_path):
    assert "has no checkpoint yet. Train: rqwen3 --profile " in one_sentence(fresh.rqwen3("generate", "--prompt", "a"))
    nothing = fresh.rqwen3("generate", "--prompt", "a", "--weights", str(tmp_path / "nothing"))
    assert "no such folder" in one_sentence(nothing)


def test_generate_interrupted_while_it_loads_says_so_in_one_sentence(finished):
    command = finished.command("generate", "--prompt", "a")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as child:
        while child.poll() is None and not psutil.Process(child.pid).children():
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        said = child.communicate(timeout=60)[0]
    assert said == "rqwen3: stopped. The same command goes on from here.\n"
    assert child.returncode == 130


def test_port_taken_is_refused_with_the_way_out(fresh):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = fresh.rqwen3("up", "--port", str(port))
    assert f"Port {port}" in one_sentence(refused)
    assert f"PORT={port + 1}" in refused.stderr
