"""How an error ends a command: those that a person can mend in words, the others as they are."""

import os
import shlex
import socket

import click
import pytest
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from model.errors import ConfigError
from model.files import write_text
from rqwen3_pipeline import cli
from rqwen3_pipeline.cli_common import Group
from rqwen3_pipeline.settings import Settings, shipped
from tests.rqwen3_pipeline.site import PROFILE


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


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A profile of one's own, and the command line on it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the commands export their settings
    profile, home = tmp_path / "tiny.toml", tmp_path / "a b"
    profile.write_text(PROFILE)
    flags = ["--profile", str(profile), "--home", str(home)]

    def call(*arguments: str) -> str:
        return CliRunner().invoke(cli.main, [*flags, *arguments]).output

    return call, f"rqwen3 {shlex.join(flags)}", profile, home


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["experiment", "stop"], "experiment resume tiny"),
        (["experiment", "status"], "sources lock"),
        (["experiment", "resume"], "sources lock"),
        (["experiment", "compare"], "status"),
        (["backfill", "digests/pes2o", "--source", "wikipedia"], "backfill digests --source wikipedia"),
    ],
)
def test_command_that_any_output_names_goes_to_the_same_run_root(tiny, arguments, named):
    call, program, *_ = tiny
    assert f"{program} {named}\n" in call(*arguments)


def test_status_of_a_run_root_whose_daemon_is_down_names_it_in_the_command_that_starts_one(tiny):
    call, program, _, home = tiny
    write_text(home / "dagster/dagster.yaml", "storage: {}\n")
    assert f"start it: {program} up\n" in call("status")


def test_taken_port_names_the_run_root_in_the_command_for_another(tiny):
    call, program, *_ = tiny
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"{program} up --port {port + 1}, or: make ui" in call("up", "--port", str(port))


@pytest.mark.parametrize(
    ("profile", "home", "command"),
    [
        ("demo", None, "make ui"),
        ("smoke", None, "make ui PROFILE=smoke"),
        ("configs/smoke.toml", None, "rqwen3 --profile smoke up"),
        ("demo", "/there/my root", "rqwen3 --home '/there/my root' up"),
    ],
)
def test_command_for_the_ui_opens_the_run_root_that_the_run_was_in(monkeypatch, profile, home, command):
    monkeypatch.chdir(shipped("dagster.yaml").parent)
    assert cli._ui_command(Settings(profile=profile, home=home)) == command
