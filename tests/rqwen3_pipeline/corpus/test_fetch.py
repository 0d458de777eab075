import os
import shutil
from types import SimpleNamespace

import pytest

from model import files
from model.errors import DiskSpaceError, SourceError
from model.files import sha256_bytes
from rqwen3_pipeline.corpus import fetch
from rqwen3_pipeline.corpus.fetch import fetch_file, require_space
from rqwen3_pipeline.corpus.hub import Pin
from rqwen3_pipeline.corpus.lock import Lock, LockedFile, lock_folder

from .made import prose, write


@pytest.fixture
def pinned_lock(tmp_path):
    """A file that the Hub's cache holds, and its lock."""
    cached = write(tmp_path / "blob", [{"content": prose(1)}] * 3)
    data = cached.read_bytes()
    file = LockedFile(
        key="00000", path="a.parquet", name="a.parquet", size_bytes=len(data), sha256=sha256_bytes(data), rows=None
    )
    pin = Pin(dataset="a/b", config="", revision="c" * 40)
    return cached, Lock(sources={"pes2o": (file,)}, sha256="x", origin=None, pins={"pes2o": pin})


def no_room(monkeypatch, free_bytes):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))


def test_file_of_the_hub_becomes_a_second_name_with_its_rows(root, pinned_lock, monkeypatch):
    cached, lock = pinned_lock
    monkeypatch.setattr(fetch, "fetch_pinned", lambda *_: cached)
    assert fetch_file(root, lock, "pes2o", "00000") == {"bytes": cached.stat().st_size, "rows": 3}
    assert root.raw("pes2o", "a.parquet").samefile(cached)


def test_file_of_the_hub_is_copied_where_no_hard_link_can_be(root, pinned_lock, monkeypatch):
    cached, lock = pinned_lock

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(fetch, "fetch_pinned", lambda *_: cached)
    monkeypatch.setattr(os, "link", refuse)
    fetch_file(root, lock, "pes2o", "00000")
    copy = root.raw("pes2o", "a.parquet")
    assert copy.read_bytes() == cached.read_bytes()
    assert not copy.samefile(cached)


def test_file_of_the_hub_that_is_no_parquet_is_named(root, pinned_lock, monkeypatch):
    cached, lock = pinned_lock
    monkeypatch.setattr(fetch, "fetch_pinned", lambda *_: cached)
    cached.write_bytes(b"<html>")
    with pytest.raises(SourceError, match=r"a\.parquet: what the Hub published is no parquet file"):
        fetch_file(root, lock, "pes2o", "00000")


def test_space_for_all_missing_files_is_asked_for_before_the_first(root, config, folder, monkeypatch):
    lock = lock_folder(root, config, folder)
    items = [("fineweb_edu", "00000"), ("fineweb_edu", "00001")]
    first, second = (lock.file(*item).size_bytes for item in items)
    no_room(monkeypatch, first + second)
    require_space(root, lock, items)
    no_room(monkeypatch, first + second - 1)
    with pytest.raises(DiskSpaceError, match="fetching 2 files"):
        require_space(root, lock, items)
    monkeypatch.undo()
    fetch_file(root, lock, *items[0])
    no_room(monkeypatch, second)
    require_space(root, lock, items)


def test_space_for_the_hubs_files_is_asked_for_where_its_cache_lies(root, pinned_lock, monkeypatch, tmp_path):
    _, lock = pinned_lock
    monkeypatch.setattr(fetch, "is_cached", lambda *_: False)
    monkeypatch.setattr(fetch, "_hub_cache", lambda: tmp_path / "hf" / "hub")
    no_room(monkeypatch, 10)
    with pytest.raises(DiskSpaceError, match=r"into the Hub's cache \(HF_HOME\)"):
        require_space(root, lock, [("pes2o", "00000")])
    monkeypatch.setattr(fetch, "is_cached", lambda *_: True)
    require_space(root, lock, [("pes2o", "00000")])


def test_locked_file_of_a_folder_that_is_gone_is_named(root, config, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "moved")
    lock = lock_folder(root, config, tmp_path / "moved")
    (tmp_path / "moved" / "pes2o.parquet").unlink()
    with pytest.raises(SourceError, match=r"pes2o\.parquet: locked, but gone"):
        fetch_file(root, lock, "pes2o", "00000")
