import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model.errors import DiskSpaceError
from rqwen3_pipeline.preflight import PreflightError
from rqwen3_pipeline.programs import ProgramFailedError, failure_code, run_program, tail


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a module that children can run with `-m`, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(source: str) -> str:
        (tmp_path / "child_program.py").write_text(source)
        return "child_program"

    return write


def test_exit_code_allowed_is_returned(program, tmp_path):
    module = program("import sys; sys.exit(int(sys.argv[1]))")
    assert run_program(module, ["75"], tmp_path / "log", ok=(0, 75)) == 75


def test_exit_code_not_allowed_raises_with_the_logs_tail_and_code(program, tmp_path):
    module = program("import sys; print('the reason'); sys.exit(3)")
    with pytest.raises(ProgramFailedError, match="the reason") as caught:
        run_program(module, [], tmp_path / "log")
    assert caught.value.code == 3


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("print('step 1\\nerror: no room.\\nbye'); sys.exit(74)", "ended with exit code 74: no room."),
        ("raise ValueError('odd')", "ended with exit code 1: ValueError: odd"),
        ("sys.exit(2)", "ended with exit code 2"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_program_that_fails_is_told_in_a_first_line_with_its_last_words(program, tmp_path, source, line):
    with pytest.raises(ProgramFailedError) as caught:
        run_program(program(f"import os, sys\n{source}"), [], tmp_path / "log")
    assert str(caught.value).splitlines()[0] == f"python -m child_program {line}"
    assert str(tmp_path / "log") in str(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProgramFailedError("killed", -9), -9),
        (PreflightError("red", 71), 71),
        (DiskSpaceError("2 GiB free"), 74),
        (OSError(errno.ENOSPC, "No space left on device"), 74),
        (MemoryError(), 71),
        (OSError(errno.ENOENT, "No such file"), 1),
        (ValueError("odd"), 1),
    ],
)
def test_failure_code_of_the_workers_own_error_is_what_the_trainer_would_have_ended_with(error, code):
    assert failure_code(error) == code


def test_arguments_with_spaces_and_quotes_arrive_unchanged(program, tmp_path):
    module = program("import sys; print(sys.argv[1:])")
    arguments = ["a b", "'\"$(touch pwned)", "é\n"]
    run_program(module, arguments, tmp_path / "log")
    assert (tmp_path / "log").read_text() == repr(arguments) + "\n"


def test_tail_of_an_appended_log_shows_only_this_run(program, tmp_path):
    log = tmp_path / "log"
    log.write_text("earlier\n")
    module = program("print('now')")
    run_program(module, [], log)
    assert log.read_text() == "earlier\nnow\n"
    assert tail(log, len("earlier\n")) == "now"


@pytest.mark.parametrize("interrupts", [1, 3])
def test_parent_interrupted_asks_the_child_and_waits_for_it(program, tmp_path, interrupts):
    module = program(
        "import signal, sys, time\n"
        "def stop(*_):\n    print('saving', flush=True); time.sleep(1.5); print('saved', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(60)\n"
    )
    log = tmp_path / "log"
    script = (
        "from rqwen3_pipeline.programs import run_program\nfrom pathlib import Path\n"
        f"run_program({module!r}, [], Path({str(log)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, env=os.environ)
    wait_for(log, "ready")
    parent.send_signal(signal.SIGINT)
    wait_for(log, "saving")
    for _ in range(interrupts - 1):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.2)
    parent.wait(timeout=30)
    assert "saved" in log.read_text()


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"{text!r} never appeared in {log}"
        time.sleep(0.05)
