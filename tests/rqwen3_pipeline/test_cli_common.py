"""How an error ends a command: those that a person can mend in words, the others as they are."""

import click
import pytest
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from model.errors import ConfigError
from rqwen3_pipeline.cli_common import Group


def ended_by(error: Exception):
    @click.group(cls=Group)
    def main() -> None:
        pass

    @main.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(main, ["fail"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("no such key"), 2, "rqwen3: no such key"),
        (OSError(28, "No space left on device", "/there"), 1, "No space left on device"),
        (
            OperationalError("SELECT 1", {}, Exception("disk I/O error")),
            1,
            "events can't be read or written: (builtins",
        ),
        (ModuleNotFoundError("no torch", name="torch"), 1, "the package torch is not installed"),
    ],
)
def test_error_that_a_person_can_mend_is_one_sentence_and_an_exit_code(error, code, said):
    done = ended_by(error)
    assert (done.exit_code, done.output.count("\n")) == (code, 1)
    assert said in done.output


def test_full_disk_without_a_file_is_told_of_the_run_root(tmp_path, monkeypatch):
    monkeypatch.setenv("RQWEN3_HOME", str(tmp_path))
    said = ended_by(OSError(28, "No space left on device")).output
    assert said.startswith(f"rqwen3: {tmp_path}: No space left on device (")


def test_error_of_another_kind_is_raised():
    assert isinstance(ended_by(ValueError("odd")).exception, ValueError)


def test_command_that_an_error_names_goes_to_the_same_run_root():
    @click.group(cls=Group)
    @click.pass_context
    def main(context: click.Context) -> None:
        context.obj = {"home": "a folder", "profile": "tiny", "workers": 3}

    @main.command()
    def fail() -> None:
        raise ConfigError(
            "x: in use by rqwen3 corpus build (process 3); no manifest: rqwen3 corpus build, "
            "rqwen3 trace; or name its root: rqwen3 --home DIR export; rqwen3 plan says more"
        )

    assert CliRunner().invoke(main, ["fail"]).output == (
        "rqwen3: x: in use by rqwen3 corpus build (process 3); no manifest: rqwen3 --profile tiny --home 'a folder' "
        "corpus build, rqwen3 --profile tiny --home 'a folder' trace; or name its root: rqwen3 --home DIR export; "
        "rqwen3 plan says more\n"
    )
