"""The hand on a chain that has not begun, and what `rqwen3 experiment status` says before there is an attempt."""

import json
import shlex

import pytest

from model.errors import ConfigError
from model.files import write_json
from rqwen3_pipeline.experiment_commands import may_run, new, resume, show, stop
from rqwen3_pipeline.settings import Settings
from tests.rqwen3_pipeline.site import PROFILE


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "tiny.toml").write_text(PROFILE)
    return Settings(profile=str(tmp_path / "tiny.toml"), home=tmp_path / "home")


@pytest.mark.parametrize("name", [None, "tiny"])
def test_stop_before_the_first_job_keeps_a_queued_chain_from_beginning_until_it_is_lifted(settings, capsys, name):
    stop(settings, name, "the wrong corpus")
    assert f"tiny: not begun in {settings.home} yet" in capsys.readouterr().out
    assert not may_run(settings, name)
    assert "the wrong corpus" in capsys.readouterr().err
    resume(settings, name)
    assert may_run(settings, name)
    stop(settings, name, "")
    assert not may_run(settings, name)


@pytest.mark.parametrize(
    "act", [lambda settings: stop(settings, "tinny", ""), lambda settings: resume(settings, "tinny")]
)
def test_hand_on_an_experiment_that_is_neither_there_nor_the_profiles_is_refused(settings, act):
    with pytest.raises(ConfigError, match=r"no experiment 'tinny' in .*The profile's is tiny"):
        act(settings)
    assert not settings.home.exists()


def next_of(sample, capsys) -> tuple[str, str]:
    show(Settings(profile=str(sample.config_path), home=sample.root.path), None, as_json=True)
    step = json.loads(capsys.readouterr().out)["next"]
    return step["action"], step["reason"]


def test_show_of_an_empty_root_names_the_lock_and_its_command(empty_run, capsys):
    action, reason = next_of(empty_run, capsys)
    assert action == "stop"
    assert reason.startswith(f"{empty_run.root.lock} is not there")
    assert reason.endswith("rqwen3 sources lock")


def test_show_goes_through_corpus_and_preflight_to_the_first_submission(corpus_run, capsys):
    manifest = corpus_run.root.manifest.read_bytes()
    corpus_run.root.manifest.unlink()
    assert next_of(corpus_run, capsys)[1].endswith("the corpus is not made yet. The next step is in: rqwen3 status")
    corpus_run.root.manifest.write_bytes(manifest)
    assert next_of(corpus_run, capsys)[1].startswith("preflight: it has not run. Materialize preflight in the UI")
    write_json(corpus_run.folder / "preflight.json", {"passed": True})
    corpus_run.root.lock.unlink()  # a corpus that came from elsewhere
    assert next_of(corpus_run, capsys) == ("submit", "the first submission")


def test_command_for_a_new_run_root_with_a_space_in_its_path_can_be_typed(tmp_path, capsys):
    profile = tmp_path / "tiny.toml"
    profile.write_text(PROFILE)
    new(Settings(profile=str(profile), home=tmp_path / "a b" / "tiny"), "v3", None, ["data.oracle_documents=4"])
    root = tmp_path / "a b" / "v3"
    config = root / "experiments" / "v3" / "config.toml"
    command = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(command) == ["rqwen3", "--profile", str(config), "--home", str(root), "run"]
