"""The tokenizer and pinned files through the Hub's real client, against the loopback Hub."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model.errors import SourceError
from rqwen3_pipeline.corpus.hub import explain
from tests.loopback_hub import Step, loopback_hub

BODY = b'{"version": "1.0"}'


@pytest.fixture
def hub():
    with loopback_hub() as server:
        server.repositories["Qwen/Qwen3-0.6B"].commit({"tokenizer.json": BODY})
        yield server


@pytest.fixture
def environment(tmp_path, hub):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RQWEN3_"))}
    return {**clean, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.endpoint, "RQWEN3_HUB_PATIENCE_S": "5"}


def child(environment, code):
    """In a process of its own, as the client reads its environment when it is imported."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def fetch(environment, repo="Qwen/Qwen3-0.6B"):
    code = f"from rqwen3_pipeline.corpus.hub import fetch_tokenizer\nprint(fetch_tokenizer({repo!r}).read_bytes())"
    return child(environment, code)


def test_tokenizer_is_downloaded_and_then_served_from_the_cache_offline(environment):
    assert fetch(environment).stdout.strip() == repr(BODY)
    offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fetch(offline).stdout.strip() == repr(BODY)


def test_tokenizer_in_the_cache_is_taken_while_the_hub_is_down(environment, hub):
    assert fetch(environment).stdout.strip() == repr(BODY)
    hub.plans["/resolve/"] = [Step(status=503)]
    assert fetch({**environment, "RQWEN3_HUB_PATIENCE_S": "1"}).stdout.strip() == repr(BODY)


def test_tokenizer_offline_and_not_cached_names_the_way_out(environment):
    found = fetch({**environment, "HF_HUB_OFFLINE": "1"})
    assert found.returncode != 0
    assert "TOKENIZER=FILE" in found.stderr


def test_repository_missing_is_named(environment):
    found = fetch(environment, "Qwen/none")
    assert found.returncode != 0
    assert "tokenizer.json of Qwen/none" in found.stderr


def test_leftovers_of_killed_transfers_go_when_nobody_has_written_to_them_for_an_hour(environment, hub, tmp_path):
    data = bytes(range(256)) * 20
    commit = hub.dataset("a/b").commit({"x.parquet": data})
    sha256 = hashlib.sha256(data).hexdigest()
    blobs = tmp_path / "hf" / "hub" / "datasets--a--b" / "blobs"
    blobs.mkdir(parents=True)
    old, young, other = (blobs / f"{name}.incomplete" for name in (f"{sha256}.1", f"{sha256}.2", "another.3"))
    for place in (old, young, other):
        place.write_bytes(b"half")
    hours_ago = time.time() - 2 * 3600
    for place in (old, other):
        os.utime(place, (hours_ago, hours_ago))
    done = child(
        environment,
        "from rqwen3_pipeline.corpus.hub import Pin, fetch_pinned\n"
        f"pin = Pin(dataset='a/b', config='', revision={commit!r})\n"
        f"print(fetch_pinned(pin, 'x.parquet', {len(data)}, {sha256!r}))",
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == data
    assert [place.exists() for place in (old, young, other)] == [False, True, True]


def test_explain_finds_the_projects_own_error_behind_the_clients():
    own, outer = SourceError("the Hub is busy"), RuntimeError("outer")
    outer.__cause__ = own
    assert explain(outer, "a/b", "main") is own


def test_explain_of_an_unknown_error_keeps_its_words():
    assert "a/b/f: KeyError: 'x'" in str(explain(KeyError("x"), "a/b", "main", "f"))
