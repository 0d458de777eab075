"""A transfer that was killed goes on where it was, with the Hub's real client against the loopback Hub."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.loopback_hub import OK, Step, loopback_hub

DATA = bytes(range(256)) * 100_000
"""25.6 MB; the Hub's client writes 10 MB at a time."""
SHA256 = hashlib.sha256(DATA).hexdigest()
WROTE = 20 * 2**20

CODE = """
import sys
from rqwen3_pipeline.corpus.hub import Pin, fetch_pinned
pin = Pin(dataset='a/b', config='', revision=sys.argv[1])
print(fetch_pinned(pin, 'x.parquet', int(sys.argv[2]), sys.argv[3]))
"""


@pytest.fixture
def hub():
    with loopback_hub() as server:
        server.dataset("a/b").commit({"x.parquet": DATA})
        yield server


@pytest.fixture
def part(tmp_path):
    """Where the bytes lie that have arrived."""
    blobs = tmp_path / "hf" / "hub" / "datasets--a--b" / "blobs"
    blobs.mkdir(parents=True)
    return blobs / f"{SHA256}.rqwen3.incomplete"


def start(hub, tmp_path, sha256=SHA256):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RQWEN3_"))}
    env = {**clean, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.endpoint, "RQWEN3_HUB_PATIENCE_S": "5"}
    revision = next(iter(hub.dataset("a/b").commits))
    command = [sys.executable, "-c", CODE, revision, str(len(DATA)), sha256]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def fetched(hub, tmp_path):
    out, err = start(hub, tmp_path).communicate(timeout=120)
    assert out, err
    return Path(out.strip()).read_bytes()


def bodies(hub):
    """Where each request for the bytes began."""
    spans = [span for _, method, path, span in hub.requests if "/cdn/" in path and method == "GET"]
    return [int(span.removeprefix("bytes=").rstrip("-") or 0) for span in spans]


def test_transfer_killed_goes_on_from_the_bytes_that_had_arrived(hub, tmp_path, part):
    hold = threading.Event()
    hub.plans["/cdn/"] = [Step(cut=WROTE + 100, hold=hold), OK]
    child = start(hub, tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_size < WROTE:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.kill()
        child.communicate()
    finally:
        hold.set()
    hub.requests.clear()
    assert fetched(hub, tmp_path) == DATA
    assert bodies(hub) == [WROTE]
    assert sorted(path.name for path in part.parent.iterdir()) == [SHA256]


@pytest.mark.parametrize(
    ("arrived", "begins"),
    [
        (DATA[:-1], [len(DATA) - 1]),
        (DATA, []),
        (bytes(1000), [1000, 0]),
        (bytes(len(DATA)), [0]),
        (DATA + b"x", [0]),
        (b"", [0]),
    ],
    ids=["all but a byte", "all, unnamed", "wrong beginning", "wrong throughout", "too long", "nothing"],
)
def test_transfer_with_a_part_of_any_kind_ends_with_the_right_bytes(hub, tmp_path, part, arrived, begins):
    part.write_bytes(arrived)
    assert fetched(hub, tmp_path) == DATA
    assert bodies(hub) == begins
    assert sorted(path.name for path in part.parent.iterdir()) == [SHA256]


def test_transfer_of_one_file_by_four_processes_asks_for_its_bytes_once(hub, tmp_path, part):
    children = [start(hub, tmp_path) for _ in range(4)]
    found = {Path(child.communicate(timeout=200)[0].strip()).read_bytes() for child in children}
    assert found == {DATA}
    assert bodies(hub) == [0]


def test_transfer_that_is_given_up_keeps_what_has_arrived_and_the_next_goes_on(hub, tmp_path, part):
    hub.plans["/cdn/"] = [Step(cut=WROTE + 1), Step(status=503)]
    _, err = start(hub, tmp_path).communicate(timeout=120)
    assert "status 503, after" in err
    assert part.stat().st_size == WROTE
    hub.plans.clear()
    hub.requests.clear()
    assert fetched(hub, tmp_path) == DATA
    assert bodies(hub) == [WROTE]


def test_transfer_of_wrong_bytes_leaves_nothing(hub, tmp_path, part):
    _, err = start(hub, tmp_path, "0" * 64).communicate(timeout=120)
    assert f"the Hub served {len(DATA):,} bytes with SHA-256 {SHA256[:12]}… twice" in err
    assert list(part.parent.iterdir()) == []
