import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from model import lock
from model.errors import LockHeldError

RECORD = {"submission": 1, "attempt": 1, "started": "then"}


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
    assert held.predecessor == holder
    assert held.still_held()


def test_acquire_where_the_number_was_reused_takes_over(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", pid_start=1)  # this process' number, another start
    assert lock.acquire(tmp_path / "LOCK", RECORD).predecessor is not None


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
    write_holder(tmp_path / "LOCK", **{"host": "elsewhere", "job_id": "12", "pid": dead_pid(), **changes})
    if taken:
        assert lock.acquire(tmp_path / "LOCK", RECORD, command).predecessor is not None
    else:
        with pytest.raises(LockHeldError, match="elsewhere"):
            lock.acquire(tmp_path / "LOCK", RECORD, command)


def test_job_alive_command_is_given_the_job_id_last(tmp_path: Path) -> None:
    write_holder(tmp_path / "LOCK", host="elsewhere", job_id="12")
    seen = tmp_path / "seen"
    code = f"import sys; open({str(seen)!r}, 'w').write(sys.argv[-1]); sys.exit(1)"
    command = shlex.join([sys.executable, "-c", code])
    lock.acquire(tmp_path / "LOCK", RECORD, command)
    assert seen.read_text() == "12"


def test_unreadable_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("")
    with pytest.raises(LockHeldError, match="can't be read"):
        lock.acquire(tmp_path / "LOCK", RECORD)


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
