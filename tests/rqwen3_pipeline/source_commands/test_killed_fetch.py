"""`rqwen3 sources fetch` from the loopback Hub, killed at twenty random moments, and run again each time."""

import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from rqwen3_pipeline.corpus.lock import read_lock

from .hub_data import TINY, command, environment, halves, parquet, raw, rqwen3

KILLS, FILES, FILE_BYTES = 20, 5, 24 * 2**20
WAIT_S = 120.0


def start(env):
    words = command("sources", "fetch", "--workers", "2")
    return subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def kill(child, whole_group):
    """Kill the command alone, whose workers must then end by themselves, or all of its processes."""
    os.killpg(child.pid, signal.SIGKILL) if whole_group else child.kill()
    child.wait()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("the workers of a killed fetch live on")


def wait_for_bytes(hub, child):
    """Until the child asks for a body, or has none to ask for."""
    before, deadline = hub.count("/cdn/"), time.monotonic() + WAIT_S
    while hub.count("/cdn/") == before and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fetch_killed_anywhere_and_run_again_leaves_the_same_bytes(tmp_path, hub, root):
    noise = np.random.default_rng(0)
    rows = [[{"text": noise.bytes(FILE_BYTES // 4).hex(), "score": 4.0} for _ in range(4)] for _ in range(FILES)]
    files = {f"data/train-{i}.parquet": parquet(tmp_path, some) for i, some in enumerate(rows)}
    hub.dataset("a/big").commit({"README.md": b"# B\n", **files})
    change = '[data.fineweb_edu]\ndataset = "a/big"\nconfig = ""\ntokens_per_byte = 0.0000001'
    (tmp_path / "hub.toml").write_text(TINY.replace("[data.fineweb_edu]", change))
    env = environment(hub, tmp_path)
    assert rqwen3(env, "sources", "lock").returncode == 0
    assert len(read_lock(root).files("fineweb_edu")) == FILES
    expected = {path.replace("/", "__"): data for path, data in files.items()}
    hub.bytes_per_s = 24 * 2**20
    draw, struck, whole, resumed = random.Random(5), 0, 0, 0
    for number in range(KILLS):
        child = start(env)
        if number % 5:  # else at whatever it does before
            wait_for_bytes(hub, child)
        try:
            child.wait(timeout=draw.uniform(0.0, 1.5))
        except subprocess.TimeoutExpired:
            kill(child, whole_group=number % 2 == 0)
            struck += bool(halves(tmp_path))
        there = {name: data for name, data in raw(root).items() if not name.startswith(".")}
        assert there.items() <= expected.items(), number
        if there == expected or number == KILLS - 1:
            assert rqwen3(env, "sources", "fetch").returncode == 0
            assert raw(root) == expected, number
            assert not halves(tmp_path)
            whole += 1
            resumed += any(span for _, _, path, span in hub.requests if "/cdn/" in path)
            hub.requests.clear()
            shutil.rmtree(root.path / "raw")
            shutil.rmtree(tmp_path / "hf")
    assert struck >= KILLS // 5, "too few of the kills struck inside a transfer"
    assert whole
    assert resumed
