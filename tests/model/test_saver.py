import contextlib
import dataclasses
import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model import checkpoint, snapshot
from model.config import TrainConfig
from model.errors import CheckpointError, DiskSpaceError
from model.saver import Saver, SaveReport

CONFIG = TrainConfig(max_steps=1000, seq_len=8, micro_batch_size=1, keep_last=2, keep_first_step=0)


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model_state_dict": {"weight": torch.full((64, 64), float(step))},
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "scheduler_state_dict": {"last_step": step},
        "loss_history": [1.5] * step,
        "data_offset": step * 8,
    }


def save(saver: Saver, step: int, *, background: bool = True) -> dict[str, Any]:
    saved = state(step)
    saver.save(saved, {"job_id": "7"}, began=time.monotonic(), background=background)
    return saved


@pytest.fixture
def told() -> list[SaveReport]:
    return []


@pytest.fixture
def saver(tmp_path: Path, told: list[SaveReport]) -> Saver:
    return Saver(tmp_path / "checkpoints", CONFIG, told.append)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    event, original = threading.Event(), torch.save

    def waiting(*arguments: Any) -> None:
        assert event.wait(60)
        original(*arguments)

    monkeypatch.setattr(torch, "save", waiting)
    yield event
    event.set()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size; root may mount one."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_background_save_holds_the_state_of_its_moment(
    saver: Saver, told: list[SaveReport], gate: threading.Event
) -> None:
    live = save(saver, 3)
    live["model_state_dict"]["weight"].fill_(99.0)  # training goes on
    live["loss_history"].append(99.0)
    assert saver.look() is None
    assert (saver.saved_step, told) == (0, [])
    gate.set()
    assert saver.wait() is None
    saved = checkpoint.verify(saver.folder / "step_3.pt")
    again = checkpoint.load(saved.path)
    assert torch.equal(again["model_state_dict"]["weight"], torch.full((64, 64), 3.0))
    assert again["loss_history"] == [1.5] * 3
    assert (saver.saved_step, saved.sidecar["job_id"]) == (3, "7")
    assert told[0].in_background
    assert told[0].stall_s <= told[0].seconds
    assert told[0].record()["bytes"] == saved.path.stat().st_size


def test_checkpoint_found_damaged_fills_no_place_of_the_last_until_it_is_saved_anew(
    saver: Saver, told: list[SaveReport]
) -> None:
    for step in (1, 2):
        save(saver, step, background=False)
    checkpoint.set_aside(checkpoint.step_path(saver.folder, 2))
    save(saver, 3, background=False)
    assert checkpoint.steps_in(saver.folder) == [1, 2, 3]
    save(saver, 2, background=False)
    save(saver, 3, background=False)
    assert told[-1].removed == [1]
    assert checkpoint.steps_in(saver.folder) == [2, 3]


def test_save_that_gets_no_thread_is_made_while_training_waits(
    saver: Saver, told: list[SaveReport], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under a limit on memory or processes; whatever fails later finds nothing to wait for."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    save(saver, 3)
    assert saver.wait() is None
    assert checkpoint.verify(saver.folder / "step_3.pt").step == saver.saved_step == 3
    assert [report.in_background for report in told] == [False]
    assert "can't start new thread" in capsys.readouterr().err


def test_background_and_foreground_write_the_same_file(tmp_path: Path, told: list[SaveReport]) -> None:
    files = []
    for name, background in (("one", True), ("other", False)):
        saver = Saver(tmp_path / name, CONFIG, told.append)
        save(saver, 3, background=background)
        saver.wait()
        files.append((tmp_path / name / "step_3.pt").read_bytes())
    assert files[0] == files[1]
    assert [report.in_background for report in told] == [True, False]
    assert told[1].stall_s == told[1].seconds


def test_second_save_waits_for_the_first(saver: Saver, told: list[SaveReport], gate: threading.Event) -> None:
    save(saver, 1)
    writers = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    threading.Timer(0.2, gate.set).start()
    save(saver, 2)
    assert [thread.is_alive() for thread in writers] == [False]
    assert checkpoint.verify(saver.folder / "step_1.pt").step == saver.saved_step == 1
    saver.wait()
    assert [report.saved.step for report in told] == [1, 2]


def test_retention_comes_after_the_new_one_is_verified(
    saver: Saver, told: list[SaveReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(saver, step, background=False)
    monkeypatch.setattr(checkpoint, "sha256_file", lambda path: "0" * 64)  # what is read back is something else
    save(saver, 3)
    why = saver.wait()
    assert why is not None
    assert "the disk gives back other bytes" in why
    assert checkpoint.steps_in(saver.folder) == [1, 2]
    monkeypatch.undo()
    save(saver, 4)
    assert saver.wait() is None
    assert checkpoint.steps_in(saver.folder) == [2, 4]
    assert told[-1].removed == [1]
    assert "removed step_1" in str(told[-1])


def test_failed_background_save_is_told_once_and_the_next_is_in_the_foreground(
    saver: Saver, told: list[SaveReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver, 1, background=False)

    def full(*_: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        save(saver, 2)
        why = saver.wait()
        assert why is not None
        assert "step_2.pt: could not be written" in why
        assert "Disk quota exceeded" in why
        assert (saver.look(), saver.wait()) == (None, None)
        save(saver, 3)
        with pytest.raises(CheckpointError, match="quota"):
            save(saver, 4, background=False)
    assert sorted(path.name for path in saver.folder.iterdir()) == ["step_1.json", "step_1.pt"]
    assert checkpoint.verify(saver.folder / "step_1.pt").step == saver.saved_step == 1
    assert len(told) == 1


def test_save_after_a_failed_one_waits_for_its_own_end(
    saver: Saver, told: list[SaveReport], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, calls = torch.save, list[int]()

    def once_full(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments)

    monkeypatch.setattr(torch, "save", once_full)
    save(saver, 1)
    save(saver, 2)
    assert saver.saved_step == 2
    assert not told[0].in_background
    assert "Trying again" in capsys.readouterr().err


def test_without_memory_the_save_is_in_the_foreground_and_says_so(
    saver: Saver, told: list[SaveReport], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshot, "free_host_bytes", lambda: 2**20)
    save(saver, 1)
    assert (saver.saved_step, told[0].in_background) == (1, False)
    assert "too little free main memory" in capsys.readouterr().err


@pytest.mark.parametrize("background", [True, False])
def test_disk_that_fills_up_keeps_the_old_checkpoint_whole(
    tmp_path: Path, told: list[SaveReport], monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    with small_disk(tmp_path / "disk", "100k") as disk:
        saver = Saver(disk / "checkpoints", dataclasses.replace(CONFIG, keep_last=9), told.append)
        monkeypatch.setattr(checkpoint, "require_free_bytes", lambda *_: None)  # the room vanishes while it writes
        save(saver, 1, background=False)
        for step in range(2, 9):
            try:
                save(saver, step, background=background)
                why = saver.wait()
            except CheckpointError as error:
                why = str(error)
            if why is not None:
                break
        assert why is not None
        assert "No space left on device" in why
        names = sorted(path.name for path in saver.folder.iterdir())
        assert names == sorted(f"step_{good}{end}" for good in range(1, step) for end in (".json", ".pt"))
        for good in range(1, step):
            assert checkpoint.verify(checkpoint.step_path(saver.folder, good)).step == good


def test_disk_without_room_is_refused_before_writing(tmp_path: Path, told: list[SaveReport]) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        saver = Saver(disk / "checkpoints", CONFIG, told.append)
        with pytest.raises(DiskSpaceError, match=r"checkpoint step_1\.pt needs"):
            save(saver, 1, background=False)
        save(saver, 1)
        assert "needs" in str(saver.wait())
        assert list(saver.folder.iterdir()) == []


def test_read_only_folder_is_an_error_in_words(tmp_path: Path, told: list[SaveReport]) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        saver = Saver(disk / "checkpoints", CONFIG, told.append)
        save(saver, 1, background=False)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            save(saver, 2, background=False)
        assert checkpoint.verify(saver.folder / "step_1.pt").step == 1
