"""The files of the lock as partitions, which the UI and `dagster job backfill` know before any run of their own."""

import subprocess

import pytest

from rqwen3_pipeline import up
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.instance import open_instance
from rqwen3_pipeline.settings import Settings
from tests.rqwen3_pipeline.site import make_site


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", "")
    return make_site(tmp_path)


def registered(site) -> list[str]:
    with open_instance(Settings(profile=str(site.profile), home=site.home).root) as instance:
        return list(instance.get_dynamic_partitions("openwebmath_files"))


@pytest.mark.parametrize("locked", [True, False])
def test_up_registers_the_files_of_the_lock_that_is_there(site, monkeypatch, locked):
    settings = Settings(profile=str(site.profile), home=site.home)
    if locked:
        lock_folder(settings.root, corpus_config(settings.run_config), site.sources)
    monkeypatch.setattr(up, "_start", lambda *_: subprocess.Popen(["true"]))
    monkeypatch.setattr(up, "require_free_port", lambda port: None)
    assert up.serve(settings, None) == 1  # since its servers end at once here
    assert registered(site) == (["00000", "00001"] if locked else [])


def test_sources_lock_registers_its_files_where_an_instance_exists_and_makes_none(site):
    assert site.rqwen3("sources", "lock", "--folder", str(site.sources)).returncode == 0
    assert not (site.home / "dagster").exists()
    assert registered(site) == []
    again = site.rqwen3("sources", "lock", "--folder", str(site.sources))
    assert (again.returncode, "Warning" in again.stderr) == (0, False)
    assert registered(site) == ["00000", "00001"]
