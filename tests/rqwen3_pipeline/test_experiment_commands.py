"""The hand on a chain that has not begun: a stop that its first job finds, and names that are not its own."""

import pytest

from model.errors import ConfigError
from rqwen3_pipeline.experiment_commands import may_run, resume, stop
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
