import pytest

from rqwen3_pipeline import progress
from rqwen3_pipeline.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_in_a_log_is_plain_lines_at_each_tenth(capsys, clock):
    with Progress("filtered wikipedia", 100, "files") as bar:
        for _ in range(100):
            clock[0] += 1.0
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "  filtered wikipedia: 100/100 files after 100 s"
    assert not any("\r" in line for line in lines)


def test_progress_that_is_quick_says_only_the_end(capsys, clock):
    with Progress("raw wikipedia", 10, "files") as bar:
        for _ in range(10):
            clock[0] += 0.1
            bar.advance()
    assert capsys.readouterr().err.splitlines() == ["  raw wikipedia: 10/10 files after 1 s"]


def test_progress_that_is_slow_says_something_every_half_minute(capsys, clock):
    with Progress("training", 1000, "steps") as bar:
        for step in range(1, 10):
            clock[0] += 20.0
            bar.to(step)
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_progress_over_nothing_says_nothing_and_does_not_divide_by_zero(capsys):
    with Progress("empty", 0):
        pass
    assert capsys.readouterr().err == ""
