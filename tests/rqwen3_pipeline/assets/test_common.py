import threading
import time

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
