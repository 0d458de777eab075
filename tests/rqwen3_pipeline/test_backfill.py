"""What `rqwen3 backfill` hands to the daemon, and what it refuses; test_up has the daemon itself."""

import time

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus
from dagster._daemon.types import DaemonHeartbeat

from model.errors import ConfigError, CorpusError, EnvironmentProblem
from rqwen3_pipeline.backfill import DAEMON, SILENT_S, submit
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.instance import open_instance
from rqwen3_pipeline.settings import Settings
from tests.rqwen3_pipeline.site import make_site


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A locked run root on which a daemon has just given a sign of life."""
    site = make_site(tmp_path)
    settings = Settings(profile=str(site.profile), home=site.home)
    monkeypatch.setenv("DAGSTER_HOME", "")
    lock_folder(settings.root, corpus_config(settings.run_config), site.sources)
    beat(settings, 0.0)
    return settings


def beat(settings, ago_s):
    with open_instance(settings.root) as instance:
        instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - ago_s, DAEMON, "daemon", []))


def test_backfill_of_two_assets_is_one_asset_backfill_a_source(settings):
    submitted = submit(settings, ["digests", "filtered_documents"], ["openwebmath", "fineweb_edu"], None)
    assert [one.source for one in submitted] == ["openwebmath", "fineweb_edu"]
    assert submitted[0].assets == ("filtered_documents/openwebmath", "digests/openwebmath")
    assert submitted[0].partitions == ("00000", "00001")
    with open_instance(settings.root) as instance:
        found = instance.get_backfill(submitted[0].id)
        assert found.is_asset_backfill
        assert found.status == BulkActionStatus.REQUESTED
        wanted = found.asset_backfill_data.target_subset
        for name in ("filtered_documents", "digests"):
            subset = wanted.get_partitions_subset(dg.AssetKey([name, "openwebmath"]))
            assert set(subset.get_partition_keys()) == {"00000", "00001"}
        assert set(instance.get_dynamic_partitions("openwebmath_files")) == {"00000", "00001"}


def test_backfill_of_token_shards_without_a_tokenizer_is_refused_with_both_ways_to_make_it(settings):
    with pytest.raises(CorpusError, match=r"tokenizer\.json is not made yet\..* `tokenizer` in the UI.* rqwen3 corpus"):
        submit(settings, ["token_shards"], ["openwebmath"], None)
    with open_instance(settings.root) as instance:
        assert instance.get_backfills() == []


def test_backfill_of_some_partitions_names_those(settings):
    (one,) = submit(settings, ["raw_files/fineweb_edu"], [], "1")
    assert (one.source, one.partitions) == ("fineweb_edu", ("00001",))


def test_backfill_without_a_source_means_all_in_use(settings):
    assert len(submit(settings, ["raw_files"], [], None)) == 6


def test_backfill_of_an_asset_with_its_source_and_that_source_again_makes_it_once(settings):
    (one,) = submit(settings, ["raw_files/pes2o"], ["pes2o"], None)
    assert one.assets == ("raw_files/pes2o",)


@pytest.mark.parametrize(
    ("names", "sources", "files", "message"),
    [
        (
            ["filtered"],
            [],
            None,
            r"filtered: not an asset .*Valid: raw_files, filtered_documents, digests, token_shards",
        ),
        (["manifest"], [], None, "manifest: not an asset that is made file by file"),
        (["raw_files/wiki"], [], None, "no such source. Valid: fineweb_edu"),
        (["raw_files"], ["wiki"], None, "no such source. Valid: fineweb_edu"),
        (["raw_files"], ["pes2o"], "3-4", "^--partitions 3-4: pes2o has 1 files"),
        (["raw_files"], [], "3-1", "^--partitions 3-1: '3-1' is no number and no range"),
        (
            ["token_shards/wikipedia"],
            ["openwebmath"],
            None,
            r"--source openwebmath: token_shards/wikipedia .*: rqwen3 backfill token_shards --source openwebmath",
        ),
    ],
)
def test_backfill_of_what_there_is_not_lists_what_there_is(settings, names, sources, files, message):
    with pytest.raises(ConfigError, match=message):
        submit(settings, names, sources, files)


def test_backfill_with_a_daemon_that_has_fallen_silent_says_how_to_start_one(settings):
    beat(settings, SILENT_S + 60)
    with pytest.raises(EnvironmentProblem, match=r"no Dagster daemon is running .*18\d s old.*rqwen3 up"):
        submit(settings, ["raw_files"], [], None)
    with open_instance(settings.root) as instance:
        assert instance.get_backfills() == []


def test_backfill_where_no_daemon_ever_ran_or_nothing_is_locked_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", "")
    site = make_site(tmp_path)
    settings = Settings(profile=str(site.profile), home=site.home)
    with pytest.raises(CorpusError, match="no source lock"):
        submit(settings, ["raw_files"], [], None)
    lock_folder(settings.root, corpus_config(settings.run_config), site.sources)
    with pytest.raises(EnvironmentProblem, match="none ever ran here"):
        submit(Settings(profile=str(site.profile), home=site.home), ["raw_files"], [], None)
