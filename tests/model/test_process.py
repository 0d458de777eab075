"""Which processes have ended, also where /proc shows none of another user's (its mount option hidepid)."""

import os
import shlex
import subprocess
import sys
import time

import pytest

from model import process
from model.process import has_ended, process_start
from tests.model.conftest import REPOSITORY

NO_PROCESS = 2**22 + 1
"""Above the largest number that a 64-bit kernel gives."""
NOBODY = 65_534
ASKING = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from model.process import has_ended, process_start
other, gone = int(sys.argv[1]), int(sys.argv[2])
os.setgid({NOBODY})
os.setuid({NOBODY})
assert process_start(other) is None, "not hidden"
mine = os.getpid()
print(has_ended(other, 7), has_ended(gone, 7), has_ended(mine, 7), has_ended(mine, process_start(mine)))
"""


def test_process_has_ended_if_none_or_a_later_one_has_its_number() -> None:
    pid = os.getpid()
    assert not has_ended(pid, process_start(pid))
    assert has_ended(pid, 1)
    assert has_ended(NO_PROCESS, 1)
    assert not has_ended(NO_PROCESS, None)  # where there is no /proc nothing is known


@pytest.mark.parametrize("proc", [True, False])
def test_process_is_known_by_its_start_with_and_without_proc(monkeypatch: pytest.MonkeyPatch, proc: bool) -> None:
    if not proc:
        monkeypatch.setattr(process, "_PROC", process._PROC / "none")
    with subprocess.Popen(["sleep", "60"]) as child:
        start = process_start(child.pid)
        assert start
        assert process_start(child.pid) == start
        assert not has_ended(child.pid, start)
        child.kill()
        while not has_ended(child.pid, start):  # a zombie, since nobody has asked how it ended
            time.sleep(0.01)
        assert process_start(child.pid) is None
    assert process_start(child.pid) is None


def test_zombie_has_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        start = process_start(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process.pid, start)


def test_process_that_proc_hides_from_this_user_has_not_ended() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting /proc takes root")
    asking = shlex.join([sys.executable, "-c", ASKING, "$other", str(NO_PROCESS)]).replace("'$other'", '"$other"')
    script = f"mount -t proc -o hidepid=2 proc /proc || exit 77; sleep 60 & other=$!; {asking}; kill $other"
    seen = subprocess.run(["unshare", "--mount", "--pid", "--fork", "sh", "-c", script], capture_output=True, text=True)
    if seen.returncode == 77 or "unshare" in seen.stderr:
        pytest.skip("this machine lets nobody mount /proc")
    assert seen.stdout.split() == ["False", "True", "True", "False"], seen.stderr
