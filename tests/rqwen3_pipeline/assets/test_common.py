import threading
import time

from rqwen3_pipeline.assets import common
from rqwen3_pipeline.assets.common import Mirror

PATIENCE_S = 30.0


def test_mirror_whose_store_hangs_takes_lines_at_once_and_passes_on_the_newest():
    released, written = threading.Event(), []

    def write(line):
        released.wait(PATIENCE_S)
        written.append(line)

    mirror = Mirror(write)
    begin = time.monotonic()
    for i in range(100):
        mirror(f"line {i}")
    assert time.monotonic() - begin < PATIENCE_S / 2
    released.set()
    deadline = time.monotonic() + PATIENCE_S
    while written[-1:] != ["line 99"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(written) <= 3


def test_mirror_whose_store_fails_goes_on():
    written = []

    def write(line):
        if line == "first":
            raise OSError("the database is away")
        written.append(line)

    mirror = Mirror(write)
    deadline = time.monotonic() + PATIENCE_S
    mirror("first")
    while not written:
        assert time.monotonic() < deadline
        mirror("second")
        time.sleep(0.01)


def test_store_that_answers_is_taken_at_its_word_and_one_that_fails_or_hangs_is_done_without(monkeypatch, capsys):
    def fail():
        raise OSError("connection refused")

    over = threading.Event()
    assert common.ask_store(lambda: [1, 2]) == [1, 2]
    assert common.ask_store(lambda: None) is None
    assert capsys.readouterr().err == ""
    assert common.ask_store(fail) is None
    assert "connection refused; going on without it" in capsys.readouterr().err
    monkeypatch.setattr(common, "STORE_LIMIT_S", 0.1)
    assert common.ask_store(lambda: over.wait(PATIENCE_S)) is None
    over.set()
    assert "no answer in 0 s" in capsys.readouterr().err
