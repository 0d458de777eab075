"""`rqwen3 sources lock` with the Hub's real clients, against the loopback Hub."""

import hashlib

import pytest

from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.settings import SOURCES
from tests.loopback_hub import Step

from .hub_data import (
    ALL_WEB,
    FINEWEB,
    FINEWEB_FILES,
    STACK,
    TINY,
    WIKIPEDIA,
    environment,
    parquet,
    published,
    rqwen3,
    web,
)

REQUESTS_PER_SOURCE = 20
"""Bound on what locking one source costs, its measured files apart."""


def test_lock_pins_commit_hash_and_only_the_files_that_the_budget_needs(tmp_path, hub, root):
    done = rqwen3(environment(hub, tmp_path), "sources", "lock")
    assert done.returncode == 0, done.stderr
    lock = read_lock(root)
    assert lock.origin is None
    assert sorted(lock.sources) == sorted(SOURCES)
    for source, dataset in (("fineweb_edu", FINEWEB), ("wikipedia", WIKIPEDIA), ("stackexchange", STACK)):
        assert lock.pins[source].dataset == dataset
        assert lock.pins[source].revision == list(hub.dataset(dataset).commits)[-1]
        for file in lock.files(source):
            data = published(hub, dataset)[file.path]
            assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert 1 < len(lock.files("fineweb_edu")) < FINEWEB_FILES
    assert all(file.path.startswith("sample/100BT/") for file in lock.files("fineweb_edu"))
    assert [file.path for file in lock.files("textbooks")] == ["data/stanford/train-00000-of-00001.parquet"]
    assert "measured on the first" in done.stderr
    listing = len([1 for _, _, path, _ in hub.requests if not path.endswith(".parquet")])
    assert listing <= REQUESTS_PER_SOURCE * len(SOURCES)


def test_lock_again_asks_nothing_and_update_follows_the_newest_revision(tmp_path, hub, root, web_files):
    before = root.lock.read_bytes()
    assert rqwen3(web_files, "sources", "lock").returncode == 0
    assert hub.requests == []
    changed = {"sample/100BT/000_00000.parquet": parquet(tmp_path, web(500))}
    newest = hub.dataset(FINEWEB).commit({**published(hub, FINEWEB), **changed})
    assert rqwen3(web_files, "sources", "lock").returncode == 0
    assert (root.lock.read_bytes(), hub.requests) == (before, [])
    assert rqwen3(web_files, "sources", "lock", "--update").returncode == 0
    assert read_lock(root).pins["fineweb_edu"].revision == newest


def test_lock_with_a_configured_yield_fetches_no_data(tmp_path, hub, root, web_files):
    assert len(read_lock(root).files("fineweb_edu")) == FINEWEB_FILES
    env = {**web_files, "RQWEN3_HOME": str(tmp_path / "other"), "HF_HOME": str(tmp_path / "hf2")}
    done = rqwen3(env, "sources", "lock")
    assert "as the profile says" in done.stderr
    assert hub.count(".parquet") == 0
    assert (tmp_path / "other" / "sources.lock.json").read_bytes() == root.lock.read_bytes()


def test_lock_takes_a_pinned_revision_and_not_the_newest(tmp_path, hub, root):
    old = list(hub.dataset(FINEWEB).commits)[-1]
    hub.dataset(FINEWEB).commit({**published(hub, FINEWEB), "sample/100BT/000_00000.parquet": b"x" * 200})
    (tmp_path / "hub.toml").write_text(ALL_WEB.replace("tokens_per", f'revision = "{old}"\ntokens_per'))
    assert rqwen3(environment(hub, tmp_path), "sources", "lock").returncode == 0
    assert read_lock(root).pins["fineweb_edu"].revision == old


def test_lock_spends_stackexchange_on_the_sites_by_weight(tmp_path, hub, root):
    table = '[data.stackexchange]\n[data.stackexchange.sites]\n"stackoverflow.com" = 3\n"math.stackexchange.com" = 1\n'
    (tmp_path / "hub.toml").write_text(TINY.replace("[data.fineweb_edu]", table + "[data.fineweb_edu]"))
    assert rqwen3(environment(hub, tmp_path), "sources", "lock").returncode == 0
    folders = [file.path.split("/")[1] for file in read_lock(root).files("stackexchange")]
    assert set(folders) <= {"stackoverflow.com", "math.stackexchange.com"}
    (tmp_path / "hub.toml").write_text(
        TINY.replace("[data.fineweb_edu]", table.replace("math.", "maths.") + "[data.fineweb_edu]")
    )
    done = rqwen3(environment(hub, tmp_path), "sources", "lock")
    assert done.returncode == 1
    assert "no folder of the site 'maths.stackexchange.com'" in done.stderr
    assert "math.stackexchange.com" in done.stderr.split("nearest")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('dataset = "nobody/nothing"', "nobody/nothing: no such data set, or a private one. Check dataset"),
        ('config = "sample-9BT"', "configuration 'sample-9BT' can't be used (BuilderConfig 'sample-9BT' not found"),
        ('revision = "v9"', "the revision v9 is not there (any more). Pin what is there now"),
        ('dataset = "old/script"\nconfig = ""', "old/script: is a loader script"),
        ('dataset = "some/json"\nconfig = ""', "some/json/data.jsonl: no parquet file; only those are read"),
        ('dataset = "an/empty"\nconfig = ""', "an/empty: holds no data files"),
        ('dataset = "a/gate"\nconfig = ""', "a/gate: the data set is gated. Agree to its terms at http://127.0.0.1"),
    ],
)
def test_lock_of_what_is_not_there_says_the_way_out(tmp_path, hub, root, change, said):
    hub.dataset("old/script").commit({"README.md": b"# S\n", "script.py": b"import datasets\n"})
    hub.dataset("some/json").commit({"README.md": b"# J\n", "data.jsonl": b'{"text": "a"}\n'})
    hub.dataset("an/empty").commit({"README.md": b"# E\n"})
    hub.dataset("a/gate").commit({"README.md": b"# G\n", "a.parquet": b"x" * 200})
    hub.dataset("a/gate").gated = True
    (tmp_path / "hub.toml").write_text(TINY.replace("[data.fineweb_edu]", f"[data.fineweb_edu]\n{change}"))
    done = rqwen3(environment(hub, tmp_path), "sources", "lock")
    assert done.returncode == 1
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not root.lock.exists()


def test_lock_offline_says_what_to_do(tmp_path, hub):
    done = rqwen3(environment(hub, tmp_path, HF_HUB_OFFLINE="1"), "sources", "lock")
    assert done.returncode == 1
    assert "the Hub can't be asked. Where there is a network, with the same HF_HOME" in done.stderr
    assert hub.requests == []


def test_lock_that_fails_leaves_the_earlier_one(tmp_path, hub, root, web_files):
    before = root.lock.read_bytes()
    hub.plans["/tree/"] = [Step(status=503)]
    done = rqwen3({**web_files, "RQWEN3_HUB_PATIENCE_S": "1"}, "sources", "lock", "--update")
    assert done.returncode == 1
    assert "status 503, after" in done.stderr
    assert root.lock.read_bytes() == before
