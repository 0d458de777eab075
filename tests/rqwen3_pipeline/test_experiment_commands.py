"""What the commands on experiments print for a person to type."""

import shlex

from rqwen3_pipeline.experiment_commands import new
from rqwen3_pipeline.settings import Settings
from tests.rqwen3_pipeline.site import PROFILE


def test_command_for_a_new_run_root_with_a_space_in_its_path_can_be_typed(tmp_path, capsys):
    profile = tmp_path / "tiny.toml"
    profile.write_text(PROFILE)
    new(Settings(profile=str(profile), home=tmp_path / "a b" / "tiny"), "v3", None, ["data.oracle_documents=4"])
    root = tmp_path / "a b" / "v3"
    config = root / "experiments" / "v3" / "config.toml"
    command = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(command) == ["rqwen3", "--profile", str(config), "--home", str(root), "run"]
