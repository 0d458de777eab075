"""The corpus' blocking checks, each on a planted fault, and what they stop."""

import shutil

import dagster as dg
import numpy as np
import pyarrow.parquet as pq
import pytest

from rqwen3_pipeline.assets.checks import corpus_promises
from rqwen3_pipeline.assets.dedup import survivors
from rqwen3_pipeline.corpus.dedup import shadowed_path
from rqwen3_pipeline.corpus.promises import PROMISES
from rqwen3_pipeline.definitions import defs
from rqwen3_pipeline.settings import RunRoot
from tests.rqwen3_pipeline.corpus.faults import FAULTS
from tests.rqwen3_pipeline.site import Site, make_site
from tests.rqwen3_pipeline.test_corpus_commands import rqwen3


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Site:
    """A built site; tests must not change it."""
    site = make_site(tmp_path_factory.mktemp("whole"))
    done = rqwen3(site, "corpus", "build", "--sources", str(site.sources))
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def root(tmp_path, whole, monkeypatch) -> RunRoot:
    """A copy of the built run root; the environment points at it."""
    shutil.copytree(whole.home, tmp_path / "root")
    for name, value in (("PROFILE", whole.profile), ("HOME", tmp_path / "root"), ("WORKERS", 1)):
        monkeypatch.setenv(f"RQWEN3_{name}", str(value))
    return RunRoot(tmp_path / "root")


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def run(instance, job):
    return defs.resolve_job_def(job).execute_in_process(instance=instance, raise_on_error=False)


def verdicts(result):
    return {event.check_name: event.passed for event in result.get_asset_check_evaluations()}


def test_each_promise_is_a_blocking_check_of_its_own():
    specs = {spec.name: spec for spec in corpus_promises.check_specs}
    assert list(specs) == list(PROMISES) == list(FAULTS)
    assert all(spec.blocking and spec.description == PROMISES[name] for name, spec in specs.items())
    assert [asset.check_specs_by_output_name for asset in survivors].count({}) == 0


def test_manifest_of_a_good_corpus_passes_every_check_and_shows_the_realised_shares(root, instance):
    result = run(instance, "fold_manifest")
    assert result.success
    assert verdicts(result) == dict.fromkeys((*PROMISES, "free_of_benchmarks"), True)
    (record,) = instance.fetch_materializations(dg.AssetKey("manifest"), limit=1).records
    shown = record.asset_materialization.metadata
    shares = [row.data for row in shown["shares"].value.records]
    assert {row["source"] for row in shares if not row["site"]} >= {"wikipedia", "textbooks"}
    assert sum(row["realised_percent"] for row in shares if not row["site"]) == pytest.approx(100, abs=0.01)
    assert [row["site"] for row in shares if row["site"]] == ["example.org"]
    assert shown["data_card"].value.startswith("---")


@pytest.mark.parametrize("promise", PROMISES)
def test_check_fails_on_its_planted_fault(root, instance, promise):
    FAULTS[promise](root)
    result = run(instance, "verify_corpus")
    assert verdicts(result)[promise] is False
    (found,) = [event for event in result.get_asset_check_evaluations() if event.check_name == promise]
    assert found.blocking
    assert found.description


def test_token_shards_of_a_range_of_files_are_one_run_with_metadata_for_each(root, instance, whole, monkeypatch):
    monkeypatch.setenv("RQWEN3_SOURCES", str(whole.sources))
    assert run(instance, "lock_sources").success
    for path in (root.tokens / "fineweb_edu-00001.stamp.json", root.tokens / "fineweb_edu-00001-00.bin"):
        path.unlink()
    key = dg.AssetKey(["token_shards", "fineweb_edu"])
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        asset_selection=[key],
        tags={"dagster/asset_partition_range_start": "00000", "dagster/asset_partition_range_end": "00001"},
    )
    assert result.success
    found = {r.partition_key: r.asset_materialization.metadata for r in instance.fetch_materializations(key, 9).records}
    assert {partition: shown["reused"].value for partition, shown in found.items()} == {"00000": True, "00001": False}
    assert all(shown["tokens"].value > 0 for shown in found.values())
    assert verdicts(run(instance, "verify_corpus")) == dict.fromkeys(PROMISES, True)


def test_damaged_shard_blocks_what_follows_the_manifest(root, instance):
    FAULTS["hashes"](root)
    job = defs.resolve_implicit_global_asset_job_def()
    keys = [dg.AssetKey("manifest"), dg.AssetKey("preflight")]
    result = job.execute_in_process(instance=instance, asset_selection=keys, raise_on_error=False)
    assert not result.success
    assert verdicts(result)["hashes"] is False
    assert instance.get_latest_materialization_event(dg.AssetKey("preflight")) is None


def test_survivors_that_equal_another_fail_the_check(root, instance):
    assert verdicts(run(instance, "find_survivors")) == {"no_digest_twice": True}
    lost = pq.read_table(shadowed_path(root, "wikipedia_fineweb_edu")).to_pylist()
    copy = next(row for row in lost if row["by_source"] == "wikipedia")
    path = root.survivors("fineweb_edu", copy["key"])
    rows_ = np.load(path)
    np.save(path, np.sort(np.append(rows_[1:], np.uint32(copy["row"]))).astype(np.uint32))
    result = run(instance, "find_survivors")
    found = {event.asset_key.path[-1]: event for event in result.get_asset_check_evaluations()}
    assert {group: event.passed for group, event in found.items() if not event.passed} == {
        "wikipedia_fineweb_edu": False
    }
    assert "1 survivors equal another one" in found["wikipedia_fineweb_edu"].description
    rows_ = np.load(path)
    np.save(path, np.append(rows_[:-1], rows_[-2:-1]))
    assert not run(instance, "find_survivors").success
