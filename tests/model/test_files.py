import hashlib
import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import files
from model.errors import CorpusError, DiskSpaceError

NO_PROCESS = 2**22
"""Linux numbers processes below this."""


def test_atomic_path_after_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail() -> None:
        with files.atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_path_names_no_final_file_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.txt"
    with files.atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_text() == "whole"


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=3),
    )
)
def test_canonical_json_does_not_depend_on_the_order_of_keys(value: object) -> None:
    def reverse(entry: object) -> object:
        if isinstance(entry, dict):
            return {key: reverse(entry[key]) for key in reversed(list(entry))}
        return [reverse(item) for item in entry] if isinstance(entry, list) else entry

    assert files.canonical_json(value) == files.canonical_json(reverse(value))
    assert json.loads(files.canonical_json(value)) == value


def test_write_json_refuses_what_json_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_read_json_of_a_torn_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(CorpusError, match=r"a\.json: not valid JSON"):
        files.read_json(tmp_path / "a.json")


def test_sha256_file_equals_hashlib(tmp_path: Path) -> None:
    data = os.urandom(files.CHUNK_BYTES + 17)
    (tmp_path / "a").write_bytes(data)
    assert files.sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest() == files.sha256_bytes(data)


def test_append_jsonl_after_a_torn_line_loses_only_that_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    files.append_jsonl(log, {"step": 1})
    log.write_bytes(log.read_bytes() + b'{"step": 2, "lo')
    files.append_jsonl(log, {"step": 3})
    assert files.read_jsonl(log) == [{"step": 1}, {"step": 3}]


def test_read_jsonl_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert files.read_jsonl(tmp_path / "none.jsonl") == []


def test_sweep_temporaries_removes_leftovers_alone(tmp_path: Path) -> None:
    (tmp_path / ".a.pt.1.tmp").write_text("")
    (tmp_path / ".folder.2.tmp").mkdir()
    (tmp_path / "step_1.pt").write_text("")
    (tmp_path / "notes.tmp").write_text("")
    files.sweep_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.tmp", "step_1.pt"]
    assert files.sweep_temporaries(tmp_path / "missing") == []


def test_a_write_removes_what_killed_writers_of_the_same_file_left(tmp_path: Path) -> None:
    path, host, gone = tmp_path / "scores.json", socket.gethostname().partition(".")[0], NO_PROCESS
    left = [f".scores.json.{host}.{gone}.tmp", ".scores.json.other-node.12.tmp", ".scores.json.a1b2.tmp"]
    kept = [f".scores.json.{host}.{os.getppid()}.tmp", ".scores.json.other-node.13.tmp", f".a.json.{host}.{gone}.tmp"]
    for name in (*left, *kept):
        (tmp_path / name).write_text("half")
    for name in left[1:]:
        os.utime(tmp_path / name, (0, 0))
    files.write_json(path, {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted((*kept, "scores.json"))


@pytest.mark.parametrize("of", ["tiny", "tiny.old"])
def test_sweep_dead_takes_folders_and_what_was_moved_aside_too(tmp_path: Path, of: str) -> None:
    host = socket.gethostname().partition(".")[0]
    draft = tmp_path / f".{of}.{host}.{NO_PROCESS}.tmp"
    draft.mkdir()
    (draft / "model.safetensors").write_text("half")
    files.sweep_dead(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_require_free_bytes_with_too_little_room_gives_both_figures(tmp_path: Path) -> None:
    files.require_free_bytes(tmp_path / "not" / "yet", 1, "a test")
    with pytest.raises(DiskSpaceError, match=r"GiB free, a test needs 1048576\.00 GiB"):
        files.require_free_bytes(tmp_path, 2**50, "a test")


def test_file_system_kind_of_proc_is_proc() -> None:
    assert files.file_system_kind(Path("/proc/self")) == "proc"


@pytest.mark.parametrize(
    "kind",
    [
        *("9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs"),
        *("panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.s3fs", "fuse.anything-new"),
    ],
)
def test_is_network_of_what_other_hosts_share(kind: str) -> None:
    assert files.is_network(kind)


@pytest.mark.parametrize(
    "kind",
    ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", "fuse.squashfuse", "unknown"],
)
def test_is_network_of_what_is_local_is_not(kind: str) -> None:
    assert not files.is_network(kind)
