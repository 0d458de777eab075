"""`rqwen3 sources fetch` with the Hub's real client, against the loopback Hub; and the raw stage elsewhere."""

import hashlib
import itertools
import json
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.settings import RunRoot
from tests.loopback_hub import OK, Step

from .hub_data import (
    FINEWEB,
    FINEWEB_FILES,
    TINY,
    command,
    environment,
    halves,
    parquet,
    published,
    raw,
    rqwen3,
    wanted,
)

pytestmark = pytest.mark.long  # each test starts the command line, and some wait as a server asks them to

REQUESTS_PER_FILE = 3
"""Bound on what fetching one file costs when nothing goes wrong: where it is, a redirect, its bytes."""


def test_fetch_with_8_workers_stays_under_three_requests_a_file_and_lists_nothing(tmp_path, hub, root, web_files):
    done = rqwen3(web_files, "sources", "fetch", "--workers", "8")
    assert done.returncode == 0, done.stderr
    assert raw(root) == wanted(hub)
    assert len(hub.requests) <= REQUESTS_PER_FILE * FINEWEB_FILES
    assert hub.count("/api/") == 0
    assert f"{FINEWEB_FILES} files fetched, 0 current, 0 failed" in done.stdout
    assert not halves(tmp_path)
    assert rqwen3(web_files, "sources", "fetch").returncode == 0
    assert len(hub.requests) <= REQUESTS_PER_FILE * FINEWEB_FILES


def test_fetch_by_8_jobs_at_once_stays_under_three_requests_a_file(tmp_path, hub, root, web_files):
    jobs = [
        subprocess.Popen(command("sources", "fetch", "--files", str(i)), env=web_files, stdout=subprocess.DEVNULL)
        for i in range(8)
    ]
    assert [job.wait(200) for job in jobs] == [0] * 8
    assert len(hub.requests) <= REQUESTS_PER_FILE * 8
    assert hub.count("/api/") == 0
    assert len(raw(root)) == 8
    assert raw(root).items() <= wanted(hub).items()


def test_fetch_through_503_429_with_a_hint_and_a_cut_body_ends_with_the_right_bytes_once(
    tmp_path, hub, root, web_files
):
    path = read_lock(root).file("fineweb_edu", "00000").path
    hub.plans[f"/resolve/{read_lock(root).pins['fineweb_edu'].revision}/{path}"] = [
        Step(status=503),
        Step(status=429, headers={"Retry-After": "2"}),
        Step(status=429, headers={"RateLimit": '"resolvers";r=0;t=3', "RateLimit-Policy": '"fixed window";q=5;w=3'}),
        OK,
    ]
    hub.plans["/cdn/"] = [Step(status=503), Step(status=429, headers={"Retry-After": "1"}), Step(cut=1000), OK]
    done = rqwen3(web_files, "sources", "fetch", "--files", "0")
    assert done.returncode == 0, done.stderr
    assert raw(root) == {path.replace("/", "__"): published(hub, FINEWEB)[path]}
    asked = [moment for moment, method, name, _ in hub.requests if method == "GET" and "/resolve/" in name]
    waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(asked) >= 4
    assert waits[0] >= 0.5
    assert waits[1] >= 2.0
    assert waits[2] >= 3.0
    assert hub.count("/cdn/") == 4
    assert not halves(tmp_path)


def test_fetch_of_a_body_cut_late_goes_on_from_there(tmp_path, hub, root):
    noise = np.random.default_rng(0).bytes(24 * 2**20).hex()
    big = parquet(tmp_path, [{"text": noise[i : i + 10_000], "score": 4.0} for i in range(0, len(noise), 10_000)])
    assert len(big) > 22 * 2**20
    hub.dataset("a/big").commit({"README.md": b"# B\n", "data/train-0.parquet": big})
    change = '[data.fineweb_edu]\ndataset = "a/big"\nconfig = ""\ntokens_per_byte = 0.1'
    (tmp_path / "hub.toml").write_text(TINY.replace("[data.fineweb_edu]", change))
    env = environment(hub, tmp_path)
    assert rqwen3(env, "sources", "lock").returncode == 0
    hub.plans["/cdn/"] = [Step(cut=21 * 2**20), Step(status=503), OK]
    done = rqwen3(env, "sources", "fetch")
    assert done.returncode == 0, done.stderr
    assert list(raw(root).values()) == [big]
    starts = [wanted for _, _, name, wanted in hub.requests if "/cdn/" in name and name.endswith(".parquet")]
    assert starts == ["", f"bytes={20 * 2**20}-", f"bytes={20 * 2**20}-"]


def test_fetch_of_a_file_that_is_gone_asks_once_and_the_others_are_fetched(tmp_path, hub, root, web_files):
    path = read_lock(root).file("fineweb_edu", "00003").path
    del published(hub, FINEWEB)[path]
    done = rqwen3(web_files, "sources", "fetch", "--files", "2-4")
    assert done.returncode == 1
    assert f"fineweb_edu/00003: {FINEWEB}/{path}: not found at revision" in done.stderr
    assert "2 files fetched, 0 current, 1 failed" in done.stdout
    assert hub.count(path) == 1
    assert raw(root).items() <= wanted(hub).items()
    assert len(raw(root)) == 2


def test_fetch_of_a_revision_that_vanished_names_it_and_the_way_out(hub, root, web_files):
    revision = read_lock(root).pins["fineweb_edu"].revision
    files = hub.dataset(FINEWEB).commits.pop(revision)
    hub.dataset(FINEWEB).commit({**files, "extra.txt": b"x"})
    done = rqwen3(web_files, "sources", "fetch", "--files", "0")
    assert done.returncode == 1
    assert f"the revision {revision} is not there (any more). Pin what is there now" in done.stderr
    assert hub.count() == 1
    assert rqwen3(web_files, "sources", "lock", "--update").returncode == 0
    assert rqwen3(web_files, "sources", "fetch", "--files", "0").returncode == 0


def test_fetch_against_endless_503_fails_that_file_in_time_and_leaves_nothing(tmp_path, hub, root, web_files):
    path = read_lock(root).file("fineweb_edu", "00001").path
    hub.plans[path] = [Step(status=503)]
    began = time.monotonic()
    done = rqwen3({**web_files, "RQWEN3_HUB_PATIENCE_S": "4"}, "sources", "fetch", "--files", "0-2")
    assert time.monotonic() - began < 25
    assert done.returncode == 1
    assert "fineweb_edu/00001: GET http://127.0.0.1" in done.stderr
    assert "status 503, after" in done.stderr
    assert "RQWEN3_HUB_PATIENCE_S" in done.stderr
    assert hub.count(path) <= 12
    assert len(raw(root)) == 2
    assert not halves(tmp_path)
    hub.plans.clear()
    assert rqwen3(web_files, "sources", "fetch", "--files", "0-2").returncode == 0
    assert len(raw(root)) == 3


def test_fetch_asked_to_wait_longer_than_allowed_gives_up_at_once(hub, root, web_files):
    path = read_lock(root).file("fineweb_edu", "00000").path
    hub.plans[path] = [Step(status=429, headers={"Retry-After": "86400"})]
    done = rqwen3(web_files, "sources", "fetch", "--files", "0")
    assert done.returncode == 1
    assert "status 429, which asks to wait 86,400 s" in done.stderr
    assert hub.count(path) == 1


@pytest.mark.parametrize("times", [1, 9])
def test_fetch_of_wrong_bytes_tries_once_more_and_keeps_nothing_wrong(tmp_path, hub, root, web_files, times):
    file = read_lock(root).file("fineweb_edu", "00000")
    right = published(hub, FINEWEB)[file.path]
    wrong = bytes([right[0] ^ 1]) + right[1:]
    hub.plans[f"/cdn/datasets/{FINEWEB}"] = [*[Step(body=wrong)] * times, OK]
    done = rqwen3(web_files, "sources", "fetch", "--files", "0")
    if times == 1:
        assert done.returncode == 0, done.stderr
        assert raw(root) == {file.name: right}
        return
    assert done.returncode == 1
    assert f"the Hub served {len(right):,} bytes with SHA-256 {hashlib.sha256(wrong).hexdigest()[:12]}" in done.stderr
    assert f"and {file.sha256[:12]}" in done.stderr
    assert raw(root) == {}
    kept = [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.read_bytes() == wrong]
    assert kept == []


def test_fetch_killed_inside_a_body_leaves_no_half_file_and_goes_on(tmp_path, hub, root, web_files):
    hold = threading.Event()
    hub.plans["/cdn/"] = [OK, Step(cut=3000, hold=hold), OK]
    child = subprocess.Popen(command("sources", "fetch", "--files", "0-3", "--workers", "1"), env=web_files)
    try:
        while hub.count("/cdn/") < 2:
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
        child.wait()
    finally:
        hold.set()
    assert len(raw(root)) == 1
    assert raw(root).items() <= wanted(hub).items()
    before = hub.count("/cdn/")
    done = rqwen3(web_files, "sources", "fetch", "--files", "0-3")
    assert done.returncode == 0, done.stderr
    assert "3 files fetched, 1 current, 0 failed" in done.stdout
    assert len(raw(root)) == 4
    assert raw(root).items() <= wanted(hub).items()
    assert hub.count("/cdn/") == before + 3


def test_fetch_offline_takes_the_cache_and_names_what_it_lacks(tmp_path, hub, root, web_files):
    assert rqwen3(web_files, "sources", "fetch", "--files", "0-1").returncode == 0
    other = RunRoot(tmp_path / "other")
    other.path.mkdir()
    other.lock.write_bytes(root.lock.read_bytes())
    env = environment(None, tmp_path, HF_HUB_OFFLINE="1", RQWEN3_HOME=str(other.path))
    done = rqwen3(env, "sources", "fetch", "--files", "0-2")
    assert done.returncode == 1
    assert "2 files fetched, 0 current, 1 failed" in done.stdout
    assert "fineweb_edu/00002" in done.stderr
    assert "not in the cache" in done.stderr
    assert raw(other) == raw(root)


def test_fetch_takes_no_second_copy_where_the_cache_is_on_the_same_file_system(tmp_path, hub, root, web_files):
    assert rqwen3(web_files, "sources", "fetch", "--files", "0").returncode == 0
    file = read_lock(root).file("fineweb_edu", "00000")
    blob = next((tmp_path / "hf").rglob(f"blobs/{file.sha256}"))
    assert root.raw("fineweb_edu", file.name).samefile(blob)


def test_fetch_of_a_gated_file_says_where_to_agree(hub, root, web_files):
    hub.dataset(FINEWEB).gated = True
    done = rqwen3(web_files, "sources", "fetch", "--files", "0")
    assert done.returncode == 1
    assert f"the data set is gated. Agree to its terms at {hub.endpoint}/datasets/{FINEWEB}" in done.stderr
    assert rqwen3({**web_files, "HF_TOKEN": "hf_x"}, "sources", "fetch", "--files", "0").returncode == 0


def test_fetch_without_a_lock_names_the_command(tmp_path, hub):
    done = rqwen3(environment(hub, tmp_path), "sources", "fetch")
    assert done.returncode == 1
    assert "no source lock. Make it: rqwen3 sources lock" in done.stderr


def test_corpus_build_from_the_hub_gives_the_tokens_of_a_build_from_a_folder(tmp_path, hub, root):
    env = environment(hub, tmp_path)
    done = rqwen3(env, "corpus", "build")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "mirror"
    for source, files in read_lock(root).sources.items():
        for file in files:
            place = folder / source / file.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(root.raw(source, file.name).read_bytes())
    again = {**env, "RQWEN3_HOME": str(tmp_path / "again")}
    assert rqwen3(again, "corpus", "build", "--sources", str(folder)).returncode == 0
    here, there = (json.loads((path / "manifest.json").read_text()) for path in (root.path, tmp_path / "again"))
    assert {n: s["tokens"] for n, s in here["sources"].items()} == {n: s["tokens"] for n, s in there["sources"].items()}
    hub.requests.clear()
    assert rqwen3(env, "corpus", "build").returncode == 0
    assert hub.requests == []


def test_raw_files_as_assets_come_from_the_hub(tmp_path, hub, root):
    (tmp_path / "hub.toml").write_text(TINY)
    script = """
from rqwen3_pipeline.assets.common import Pipeline
from rqwen3_pipeline.instance import open_instance
from rqwen3_pipeline.local_run import LocalRun, _lock
from rqwen3_pipeline.settings import Settings
settings = Settings()
instance = open_instance(settings.root)
run = LocalRun(Pipeline(settings), instance)
_lock(run)
print(run.by_file("raw", "raw_files"))
print(run.by_file("raw", "raw_files"))
"""
    env = environment(hub, tmp_path)
    done = subprocess.run([*command()[:1], "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = len(read_lock(root).files("fineweb_edu"))
    assert done.stdout.split() == [str(made), "0"]
    assert len(raw(root)) == made
    assert raw(root).items() <= wanted(hub).items()
