"""The assets that work file by file, run in this process on a tiny site: metadata, checks, and what they block."""

import dagster as dg
import pytest

from model.files import read_json
from rqwen3_pipeline.definitions import defs
from tests.rqwen3_pipeline.corpus.made import prose, write
from tests.rqwen3_pipeline.site import PROFILE, make_site

SOURCE = "textbooks"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site with a source of three files, locked; the environment points at it."""
    site = make_site(tmp_path)
    (site.sources / f"{SOURCE}.parquet").unlink()
    for i in range(3):
        write(site.sources / SOURCE / f"{i}.parquet", [{"text": prose(100 * i + j)} for j in range(40)])
    for name, value in (("PROFILE", site.profile), ("HOME", site.home), ("SOURCES", site.sources), ("WORKERS", 1)):
        monkeypatch.setenv(f"RQWEN3_{name}", str(value))
    return site


@pytest.fixture
def instance(site):
    with dg.DagsterInstance.ephemeral() as instance:
        assert defs.resolve_job_def("lock_sources").execute_in_process(instance=instance).success
        yield instance


def run(instance, *assets, first="00000", last="00002"):
    """One run over a range of partitions, as an asset back-fill makes it."""
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    job = defs.resolve_implicit_global_asset_job_def()
    keys = [dg.AssetKey([name, SOURCE]) for name in assets]
    return job.execute_in_process(instance=instance, asset_selection=keys, tags=tags, raise_on_error=False)


def verdicts(result):
    return {(e.asset_key.path[0], e.check_name): e.passed for e in result.get_asset_check_evaluations()}


def test_run_over_raw_and_filtered_passes_every_check_and_shows_each_partition(site, instance):
    result = run(instance, "raw_files", "filtered_documents", "digests")
    assert result.success
    expected = {("raw_files", "hashes"), ("raw_files", "columns")}
    expected |= {("filtered_documents", name) for name in ("hashes", "columns", "share_kept")}
    assert verdicts(result) == dict.fromkeys(expected, True)
    key = dg.AssetKey(["filtered_documents", SOURCE])
    found = {r.partition_key: r.asset_materialization.metadata for r in instance.fetch_materializations(key, 9).records}
    for partition in ("00000", "00001", "00002"):
        assert found[partition]["rows"].value == 40
        assert found[partition]["rows_per_s"].value > 0
        assert found[partition]["length_histogram"].value.startswith("![")
        assert {row.data["reason"] for row in found[partition]["funnel"].value.records} == {"kept"}


def test_run_again_reuses_the_pieces_and_claims_no_speed(site, instance):
    run(instance, "raw_files", "filtered_documents")
    assert run(instance, "filtered_documents").success
    key = dg.AssetKey(["filtered_documents", SOURCE])
    (record,) = instance.fetch_materializations(key, limit=1).records
    assert record.asset_materialization.metadata["reused"].value is True
    assert "rows_per_s" not in record.asset_materialization.metadata


def test_raw_file_damaged_on_the_disk_fails_the_check_and_blocks_what_follows(site, instance):
    assert run(instance, "raw_files").success
    (entry, *_) = read_json(site.home / "sources.lock.json")["sources"][SOURCE]["files"]
    raw = site.home / "raw" / SOURCE / entry["name"]
    data = bytearray(raw.read_bytes())
    data[60] ^= 1
    raw.write_bytes(bytes(data))
    result = run(instance, "raw_files", "filtered_documents")
    assert not result.success
    assert verdicts(result)[("raw_files", "hashes")] is False
    assert not list((site.home / "filtered").rglob("*.parquet"))


def test_source_that_keeps_too_little_fails_the_check_and_blocks_what_follows(site, instance):
    long = PROFILE.replace("[model]", "[data.textbooks]\nmin_chars = 340\n[model]", 1)
    site.profile.write_text(long.replace("oracle_documents = 3", "oracle_documents = 3\nmin_share_kept = 0.9"))
    run(instance, "raw_files")
    result = run(instance, "filtered_documents", "digests")
    assert not result.success
    assert verdicts(result)[("filtered_documents", "share_kept")] is False
    assert "less than data.min_share_kept = 0.9" in result.get_asset_check_evaluations()[-1].description
    assert not list((site.home / "digests").rglob("*.npy"))


def test_bad_file_fails_its_partition_and_the_others_are_materialized(site, instance):
    files = sorted((site.sources / SOURCE).iterdir())
    assert run(instance, "raw_files").success
    raw = site.home / "raw" / SOURCE / f"{SOURCE}__{files[1].name}"
    raw.write_bytes(raw.read_bytes()[:-100])
    result = run(instance, "filtered_documents")
    assert not result.success
    made = instance.get_materialized_partitions(dg.AssetKey(["filtered_documents", SOURCE]))
    assert len(made) == 2
