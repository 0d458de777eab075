import errno
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import files
from model.errors import CorpusError, DiskSpaceError, EnvironmentProblem, LockHeldError
from model.process import process_start

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
    files.sweep_temporaries(tmp_path / "missing")


def test_sweep_temporaries_that_spares_writers_removes_dead_ones_alone(tmp_path: Path) -> None:
    mine, dead, contender = (
        files.temporary_path(tmp_path / "dry-run.tiny"),
        temporary(tmp_path / "metrics.jsonl", NO_PROCESS, 1),
        tmp_path / ".LOCK.89ab.tmp",
    )
    for path in (mine, dead, contender):
        path.write_text("")
    files.sweep_temporaries(tmp_path, writers_too=False)
    assert sorted(tmp_path.iterdir()) == sorted((mine, contender))


def temporary(path: Path, pid: int, start: int | None) -> Path:
    """The temporary name of a writer of this machine and namespace."""
    machine = files.temporary_path(path).name.removesuffix(".tmp").rpartition(".")[2].partition("-")[0]
    return path.with_name(f".{path.name}.{machine}-{pid}-{start}.tmp")


def test_a_write_removes_what_killed_writers_of_the_same_file_left(tmp_path: Path, monkeypatch) -> None:
    path, parent = tmp_path / "scores.json", os.getppid()
    dead = [temporary(path, NO_PROCESS, 1), temporary(path, parent, 1)]  # gone, and its number used again
    living = [temporary(path, parent, process_start(parent)), path.with_name(".scores.json.0000aaaa-12-5.tmp")]
    others = [temporary(tmp_path / "a.json", NO_PROCESS, 1), tmp_path / ".scores.json.7f3a.tmp"]
    for name in (*dead, *living, *others):
        name.write_text("half")
    os.utime(living[1], (0, 0))  # a link keeps the old time of what it is linked to
    files.write_json(path, {})
    assert sorted(tmp_path.iterdir()) == sorted((*living, *others, path))
    monkeypatch.setattr(files, "LEFT_S", -1.0)  # all have been silent for longer
    files.write_json(path, {})
    assert sorted(tmp_path.iterdir()) == sorted((living[0], others[0], path))


def test_temporary_names_of_two_containers_with_the_same_process_numbers_differ(tmp_path: Path, monkeypatch) -> None:
    mine = files.temporary_path(tmp_path / "a")
    monkeypatch.setattr(files, "pid_namespace", lambda: "pid:[1]")
    assert files.temporary_path(tmp_path / "a") != mine


def test_leftover_that_cannot_be_removed_does_not_keep_the_write_from_going_on(tmp_path: Path, monkeypatch) -> None:
    left = temporary(tmp_path / "a.json", NO_PROCESS, 1)
    left.mkdir()

    def refused(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(files.shutil, "rmtree", refused)
    files.write_json(tmp_path / "a.json", {"a": 1})
    assert files.read_json(tmp_path / "a.json") == {"a": 1}
    assert left.exists()


@pytest.mark.parametrize("killed_after", ["old moved aside", "new in place"])
def test_folder_whose_replacing_was_killed_is_there_whole(tmp_path: Path, killed_after: str) -> None:
    folder, draft = tmp_path / "tiny", temporary(tmp_path / "tiny", NO_PROCESS, 1)
    for place, text in ((folder, "old"), (draft, "new")):
        place.mkdir()
        (place / "model").write_text(text)
    folder.rename(tmp_path / ".tiny.old")
    if killed_after == "new in place":
        draft.rename(folder)
    files.settle_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert (folder / "model").read_text() == ("new" if killed_after == "new in place" else "old")


def test_require_free_bytes_with_too_little_room_gives_both_figures(tmp_path: Path) -> None:
    files.require_free_bytes(tmp_path / "not" / "yet", 1, "a test")
    with pytest.raises(DiskSpaceError, match=r"GiB free, a test needs 1048576\.00 GiB"):
        files.require_free_bytes(tmp_path, 2**50, "a test")


def test_room_of_little_is_told_in_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
    with pytest.raises(DiskSpaceError, match=r"3\.0 MiB free, a test needs 9\.5 MiB"):
        files.require_free_bytes(tmp_path, 19 * 2**19, "a test")
    said = files.why_not_written(OSError(errno.ENOSPC, "", tmp_path / "gone"), tmp_path / "gone")
    assert said is not None
    assert "(3.0 MiB free now)" in said


def test_file_system_kind_of_proc_is_proc() -> None:
    assert files.file_system_kind(Path("/proc/self")) == "proc"


def answering(number: int):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_lock_on_a_file_system_without_locks_names_folder_and_kind_and_the_way_out(tmp_path, monkeypatch, number):
    monkeypatch.setattr(files.fcntl, "flock", answering(number))
    monkeypatch.setattr(files, "file_system_kind", lambda path: "lustre")
    with pytest.raises(EnvironmentProblem) as refused, files.hold_lock(tmp_path / "x.lock", "a test"):
        pass
    for words in (str(tmp_path), "lustre", os.strerror(number), "RQWEN3_HOME", "mount option flock"):
        assert words in str(refused.value)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_lock_that_another_holds_is_refused_with_its_holder(tmp_path, monkeypatch, number):
    (tmp_path / "x.lock").write_text("another (host h, process 1)")
    monkeypatch.setattr(files.fcntl, "flock", answering(number))
    with pytest.raises(LockHeldError, match=r"by another \(host h, process 1\)"):
        files.hold_lock(tmp_path / "x.lock", "a test").__enter__()


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
