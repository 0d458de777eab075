import contextlib
import errno
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from model import lock
from model.errors import LockHeldError
from tests.model.conftest import REPOSITORY

RECORD = {"submission": 1, "attempt": 1, "started": "then"}
ELSEWHERE = {"host": "elsewhere", "boot_id": "of another kernel"}
TAKE = """
import json, sys, time
from pathlib import Path
from model import lock
while time.time() < float(sys.argv[2]): pass
try:
    held = lock.acquire(Path(sys.argv[1]), {"submission": 1, "attempt": 1, "started": "now"}, "sh -c 'exit 1'")
except lock.LockHeldError:
    print("refused", flush=True)
else:
    print("held" if held.still_held() else "lost", flush=True)
    sys.stdin.read()
"""
"""A process that tries to take a lock at a given second, and then keeps it until its input ends."""


def write_holder(path: Path, **changes: object) -> dict[str, object]:
    record = {**RECORD, **lock.identity(), "token": "other", **changes}
    path.write_text(json.dumps(record))
    return record


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_acquire_then_release_leaves_no_file(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    record = json.loads((tmp_path / "LOCK").read_text())
    assert (record["pid"], record["submission"]) == (os.getpid(), 1)
    assert held.still_held()
    held.update(from_step=7)
    assert held.still_held()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_acquire_beside_a_living_holder_is_refused_naming_its_job(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", job_id="4711")
    before = (tmp_path / "LOCK").read_bytes()
    with pytest.raises(LockHeldError, match="held by job 4711") as caught:
        lock.acquire(tmp_path / "LOCK", RECORD, "false")
    assert caught.value.exit_code == 73
    assert (tmp_path / "LOCK").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


def test_acquire_after_the_holder_died_takes_over(tmp_path: Path) -> None:
    holder = write_holder(tmp_path / "LOCK", pid=dead_pid())
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    assert held.predecessors == [holder]
    assert held.still_held()


def test_acquire_where_the_number_was_reused_takes_over(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", pid_start=1)  # this process' number, another start
    assert lock.acquire(tmp_path / "LOCK", RECORD).predecessors


@pytest.mark.parametrize(
    ("changes", "command", "taken"),
    [
        ({}, None, False),
        ({}, "false", True),  # exit code 1: gone
        ({}, "true", False),  # exit code 0: alive
        ({}, "sh -c 'exit 2'", False),
        ({}, "/no/such/program", False),
        ({"job_id": None}, "false", False),
    ],
)
def test_holder_on_another_host_is_judged_by_the_command_alone(
    tmp_path: Path, changes: dict[str, object], command: str | None, taken: bool
) -> None:
    write_holder(tmp_path / "LOCK", **{**ELSEWHERE, "job_id": "12", "pid": dead_pid(), **changes})
    if taken:
        assert lock.acquire(tmp_path / "LOCK", RECORD, command).predecessors
    else:
        with pytest.raises(LockHeldError, match="elsewhere"):
            lock.acquire(tmp_path / "LOCK", RECORD, command)


def test_job_alive_command_is_given_the_job_id_last(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", **ELSEWHERE, job_id="12")
    seen = tmp_path / "seen"
    code = f"import sys; open({str(seen)!r}, 'w').write(sys.argv[-1]); sys.exit(1)"
    command = shlex.join([sys.executable, "-c", code])
    lock.acquire(tmp_path / "LOCK", RECORD, command)
    assert seen.read_text() == "12"


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"host": "a", "pi', "null", "[]", "{}", '{"pid": null}', '{"pid": "x", "pid_start": "y"}', "\x00" * 300],
)
def test_torn_or_empty_lock_is_refused_and_left(tmp_path: Path, content: str) -> None:
    torn = content.replace("{", json.dumps(lock.identity())[:-1] + ", ", 1) if content.startswith('{"pid') else content
    (tmp_path / "LOCK").write_text(torn)
    with pytest.raises(LockHeldError, match="rm "):
        lock.acquire(tmp_path / "LOCK", RECORD, "false")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("LOCK", torn)]


def test_lock_of_this_host_before_it_was_started_anew_is_taken_over(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", boot_id="before")
    assert lock.acquire(tmp_path / "LOCK", RECORD).predecessors


def test_lock_of_this_host_before_it_was_started_anew_is_the_jobs_if_that_lives(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", boot_id="before", job_id="12")  # or another host of the same name
    with pytest.raises(LockHeldError, match="answered 0 for job 12"):
        lock.acquire(tmp_path / "LOCK", RECORD, "true")


def test_lock_from_a_host_called_localhost_is_not_taken_for_one_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "localhost.localdomain")
    write_holder(tmp_path / "LOCK", boot_id="before")
    with pytest.raises(LockHeldError, match="the name of many"):
        lock.acquire(tmp_path / "LOCK", RECORD)


def test_lock_from_another_container_of_this_host_is_not_judged_by_process_numbers(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", pid=dead_pid(), pid_namespace="pid:[1]")
    with pytest.raises(LockHeldError, match="in another container"):
        lock.acquire(tmp_path / "LOCK", RECORD)


def test_job_alive_command_that_hangs_leaves_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "COMMAND_TIMEOUT_S", 0.2)
    write_holder(tmp_path / "LOCK", **ELSEWHERE, job_id="12")
    with pytest.raises(LockHeldError, match="asking for job 12 failed"):
        lock.acquire(tmp_path / "LOCK", RECORD, "sh -c 'sleep 60'")


def test_link_that_was_made_though_the_server_said_exists_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.hardlink_to

    def repeated(self: Path, target: Path) -> None:  # NFS: the answer is lost, and the request sent again
        original(self, target)
        original(self, target)

    monkeypatch.setattr(Path, "hardlink_to", repeated)
    assert lock.acquire(tmp_path / "LOCK", RECORD).still_held()


def test_lock_without_hard_links_still_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    with pytest.raises(LockHeldError, match=f"process {os.getpid()}"):
        lock.acquire(tmp_path / "LOCK", RECORD)
    assert held.still_held()
    write_holder(tmp_path / "LOCK", pid=dead_pid())
    assert lock.acquire(tmp_path / "LOCK", RECORD).still_held()
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


def test_update_of_a_lock_that_was_taken_over_is_refused(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    other = write_holder(tmp_path / "LOCK", job_id="8")
    with pytest.raises(LockHeldError, match="held by job 8"):
        held.update(from_step=3)
    assert json.loads((tmp_path / "LOCK").read_text()) == other


@pytest.mark.parametrize("killed_at", ["_create", "_adopt"])
def test_taker_that_is_killed_at_it_leaves_the_dead_holder_and_itself_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    holder = write_holder(tmp_path / "LOCK", pid=dead_pid(), started="before then")
    original = getattr(lock, killed_at)

    def killed(*arguments: object) -> bool:
        if killed_at == "_create" and (tmp_path / "LOCK").exists():
            return original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lock, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire(tmp_path / "LOCK", RECORD)
    if killed_at == "_adopt":  # it had the lock already
        taker = json.loads((tmp_path / "LOCK").read_text())
        write_holder(tmp_path / "LOCK", **taker | {"pid": dead_pid()})
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    found = [one["token"] for one in held.predecessors]
    assert found == (["other"] if killed_at == "_create" else ["other", taker["token"]])
    assert held.predecessors[0] == holder
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


def test_lock_stands_for_all_dead_holders_before_it_and_stays_until_they_are_on_record(tmp_path: Path) -> None:
    first = write_holder(tmp_path / "LOCK", pid=dead_pid(), started="1")
    write_holder(tmp_path / "LOCK", pid=dead_pid(), started="2", token="second", predecessors=[first])
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    assert [one["token"] for one in held.predecessors] == ["other", "second"]
    held.release()
    assert (tmp_path / "LOCK").exists()
    held.update(predecessors=[])
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_living_holder_that_was_set_aside_by_mistake_is_nobodys_predecessor(tmp_path: Path) -> None:
    write_holder(tmp_path / ".LOCK.0123456789abcdef.gone")
    assert lock.acquire(tmp_path / "LOCK", RECORD).predecessors == []


@pytest.mark.parametrize("step", ["write_json", "_link"])
@pytest.mark.parametrize("held", [True, False])
def test_draft_that_the_holder_sweeps_away_ends_in_words_or_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, held: bool
) -> None:
    original, swept = getattr(lock, step), list[int]()

    def sweeping(*arguments: object) -> object:
        if len(swept) < (99 if held else 2):
            swept.append(1)
            for leftover in tmp_path.glob(".*.tmp"):
                leftover.unlink()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(arguments[0]))
        return original(*arguments)

    if held:
        write_holder(tmp_path / "LOCK", job_id="4711")
    monkeypatch.setattr(lock, step, sweeping)
    if held:
        with pytest.raises(LockHeldError, match="held by job 4711"):
            lock.acquire(tmp_path / "LOCK", RECORD)
    else:
        assert lock.acquire(tmp_path / "LOCK", RECORD).still_held()
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


@pytest.mark.parametrize("stale", [True, False])
def test_processes_that_take_one_lock_at_the_same_moment_leave_one_holder(tmp_path: Path, stale: bool) -> None:
    if stale:
        write_holder(tmp_path / "LOCK", **ELSEWHERE, job_id="12")
    arguments = [sys.executable, "-c", TAKE, str(tmp_path / "LOCK"), str(time.time() + 2.0)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    takers = [subprocess.Popen(arguments, **pipes, cwd=REPOSITORY) for _ in range(4)]
    answers = [taker.stdout.readline().strip() for taker in takers]
    for taker in takers:
        taker.communicate(timeout=60)
    assert sorted(answers) == ["held", *["refused"] * 3]
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


def test_still_held_after_a_takeover_is_false_and_release_spares_it(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path / "LOCK", RECORD)
    other = write_holder(tmp_path / "LOCK")
    assert not held.still_held()
    held.release()
    assert json.loads((tmp_path / "LOCK").read_text()) == other


def test_many_takers_of_one_stale_lock_leave_one_holder(tmp_path: Path) -> None:
    for _ in range(20):
        write_holder(tmp_path / "LOCK", pid=dead_pid() if _ == 0 else 2**22 + 1)
        held: list[lock.RunLock] = []
        barrier = threading.Barrier(4)

        def take(held: list[lock.RunLock] = held, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            with contextlib.suppress(LockHeldError):
                held.append(lock.acquire(tmp_path / "LOCK", RECORD))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.still_held() for one in held] == [True]
        (tmp_path / "LOCK").unlink()
