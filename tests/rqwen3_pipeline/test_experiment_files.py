import os
import socket
import subprocess
import sys

import pytest

from model.files import write_bytes, write_json
from rqwen3_pipeline.experiment_files import checkpoints, final_checkpoint, lock_holder, saved_step


def save(folder, name, step, *, stated_bytes=None):
    path = folder / "checkpoints" / name
    write_bytes(path, b"x" * (100 + step))
    write_json(path.with_suffix(".json"), {"step": step, "bytes": stated_bytes or 100 + step, "sha256": "0" * 64})


def test_checkpoints_are_ordered_by_number_and_count_only_when_whole(tmp_path):
    for step in (900, 1000, 80):
        save(tmp_path, f"step_{step}.pt", step)
    save(tmp_path, "step_2000.pt", 2000, stated_bytes=7)
    write_bytes(tmp_path / "checkpoints" / "step_3000.pt", b"no sidecar")
    write_bytes(tmp_path / "checkpoints" / ".step_4000.pt.1.tmp", b"torn")
    found = checkpoints(tmp_path)
    assert [c.step for c in found] == [80, 900, 1000, 2000, 3000]
    assert [c.whole for c in found] == [True, True, True, False, False]
    assert saved_step(tmp_path) == 1000


def test_final_checkpoint_is_the_saved_step_once_it_is_there(tmp_path):
    assert final_checkpoint(tmp_path) is None
    assert saved_step(tmp_path) is None
    save(tmp_path, "final.pt", 50)
    assert final_checkpoint(tmp_path).step == saved_step(tmp_path) == 50


def test_checkpoint_with_a_torn_sidecar_is_not_whole(tmp_path):
    save(tmp_path, "step_5.pt", 5)
    (tmp_path / "checkpoints" / "step_5.json").write_text("{", encoding="utf-8")
    assert [c.whole for c in checkpoints(tmp_path)] == [False]


def test_lock_holder_of_this_process_is_alive_and_of_an_ended_one_dead(tmp_path):
    assert lock_holder(tmp_path) is None
    write_json(tmp_path / "LOCK", {"host": socket.gethostname(), "pid": os.getpid(), "submission": 3})
    assert lock_holder(tmp_path)["alive"] is True
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    write_json(tmp_path / "LOCK", {"host": socket.gethostname(), "pid": int(ended.stdout)})
    assert lock_holder(tmp_path)["alive"] is False


@pytest.mark.parametrize(
    ("more", "alive"),
    [
        ({"pid_start": 1}, False),
        ({"boot_id": "another"}, False),
        ({"pid_namespace": "pid:[1]"}, None),
        ({"host": "elsewhere"}, None),
        ({"pid": None}, None),
    ],
)
def test_lock_holder_is_told_from_a_namesake(tmp_path, more, alive):
    write_json(tmp_path / "LOCK", {"host": socket.gethostname(), "pid": os.getpid(), **more})
    assert lock_holder(tmp_path)["alive"] is alive


def test_lock_holder_written_by_the_trainer_is_alive(tmp_path):
    from model.lock import acquire

    held = acquire(tmp_path / "LOCK", {"submission": 1})
    assert lock_holder(tmp_path)["alive"] is True
    held.release()
    assert lock_holder(tmp_path) is None


def test_lock_that_cannot_be_read_is_there_but_unknown(tmp_path):
    (tmp_path / "LOCK").write_text("{", encoding="utf-8")
    assert lock_holder(tmp_path) == {"alive": None}
