from pathlib import Path

import pytest

from model.errors import ConfigError
from rqwen3_pipeline.settings import RunRoot, Settings, profiles


def test_profiles_shipped_all_parse():
    assert {"demo", "samples", "rqwen3_751m"} <= set(profiles())
    for name in profiles():
        assert Settings(profile=name).run_config.name == name


def test_profile_unknown_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"no profile 'dmeo'.*demo.*samples"):
        _ = Settings(profile="dmeo").config_path


def test_home_unset_lies_under_var_in_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RQWEN3_HOME", raising=False)
    assert Settings(profile="demo").root.path == tmp_path / "var" / "demo"


def test_home_set_in_the_environment_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RQWEN3_HOME", "here")
    assert Settings().root.path == tmp_path / "here"


def test_environment_variable_empty_counts_as_unset(monkeypatch):
    monkeypatch.setenv("RQWEN3_TOKENIZER", "")
    assert Settings().tokenizer is None


def test_profile_as_a_file_is_taken_from_its_path(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[run]\nname = "mine"\n')
    assert Settings(profile=str(file)).config_path == file


def test_run_root_paths_are_the_contract():
    root = RunRoot(Path("/r"))
    found = [
        root.lock,
        root.raw("wikipedia", "a.parquet"),
        root.filtered("wikipedia", "00003"),
        root.digests("wikipedia", "00003"),
        root.survivors("wikipedia", "00003"),
        root.tokens,
        root.heldout,
        root.manifest,
        root.experiment("demo"),
        root.export("demo"),
        root.evaluation("demo"),
        root.evidence("demo"),
        root.dagster_home,
    ]
    assert [str(path) for path in found] == [
        "/r/sources.lock.json",
        "/r/raw/wikipedia/a.parquet",
        "/r/filtered/wikipedia/00003.parquet",
        "/r/digests/wikipedia/00003.npy",
        "/r/survivors/wikipedia/00003.npy",
        "/r/tokens",
        "/r/tokens/heldout",
        "/r/manifest.json",
        "/r/experiments/demo",
        "/r/exports/demo",
        "/r/evaluations/demo",
        "/r/evidence/demo",
        "/r/dagster",
    ]


@pytest.mark.parametrize("name", ["../out", "a/b", "", "A", "x" * 65, "a b"])
def test_experiment_name_with_odd_characters_is_refused(name):
    with pytest.raises(ConfigError):
        RunRoot(Path("/r")).experiment(name)
