"""The trainer on a disk that is full, grows full, or takes nothing: an end in words, and a record of it at last."""

import io
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model import checkpoint, files, metrics
from model.files import read_json, read_jsonl, write_json
from model.memory import checkpoint_bytes
from model.metrics import RunLog
from tests.model.test_pretrain import train


def recorded_by_the_next_one(tiny) -> list[dict[str, Any]]:
    """The ledger after a submission that found no record of the one before, but its lock, and finished the run."""
    holder = read_json(tiny.run_dir / "LOCK")  # of this very process, which lives on
    assert (holder["stop_reason"], holder["exit_code"]) == ("disk_full", 74)
    write_json(tiny.run_dir / "LOCK", holder | {"pid_start": 1})
    assert train(tiny, submission=2) == 0
    return read_jsonl(tiny.run_dir / "ledger.jsonl")


def test_disk_that_stays_full_ends_the_run_in_words_with_the_old_checkpoint_whole(
    tiny, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    original = torch.save

    def full(state: dict[str, Any], *arguments: Any) -> None:
        if state["step"] > 4:
            raise OSError(28, "No space left on device")
        original(state, *arguments)

    monkeypatch.setattr(torch, "save", full)
    assert train(tiny) == 74
    assert "No space left on device" in capsys.readouterr().err
    assert checkpoint.verify(tiny.checkpoints / "step_4.pt").step == 4
    assert checkpoint.steps_in(tiny.checkpoints) == [4]
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["exit_code"], record["saved_step"]) == ("disk_full", 74, 4)
    monkeypatch.undo()
    assert train(tiny, submission=2) == 0


def test_room_that_retention_makes_at_the_start_is_counted(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for one more checkpoint, and a `keep_last` that was lowered for that."""
    tiny.set(save_every_steps=2, keep_last=4)
    assert train(tiny, "--until-step", "8") == 75
    held = sum(path.stat().st_size for path in tiny.checkpoints.iterdir())
    capacity_bytes = held + 3 * checkpoint_bytes(tiny.config.model) // 2

    def usage(folder: Path) -> Any:
        used_bytes = sum(path.stat().st_size for path in tiny.checkpoints.iterdir())
        return SimpleNamespace(free=capacity_bytes - used_bytes)

    monkeypatch.setattr(files.shutil, "disk_usage", usage)
    assert train(tiny, submission=2) == 74
    tiny.set(keep_last=1)
    assert train(tiny, submission=3) == 0


def test_run_folder_that_takes_no_byte_is_an_error_in_words(tiny) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    tiny.run_dir.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tiny.run_dir)], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        for option, expected, code in (("rw", "No space left on device", 74), ("ro", "Read-only file system", 1)):
            if option == "rw":
                (tiny.run_dir / "filler").write_bytes(b"")
                with (tiny.run_dir / "filler").open("wb") as file, pytest.raises(OSError, match="No space"):
                    file.write(bytes(2**22))
            subprocess.run(["mount", "-o", f"remount,{option}", str(tiny.run_dir)], check=True)
            output, _ = (process := tiny.start()).communicate(timeout=120)
            assert process.returncode == code, output
            assert f"error: {tiny.run_dir}" in output
            assert expected in output or " free, " in output
            assert "Traceback" not in output
    finally:
        subprocess.run(["umount", str(tiny.run_dir)], check=True)


@pytest.mark.parametrize("word_of_it", [True, False])
def test_end_that_no_record_tells_of_leaves_the_lock_from_which_the_next_one_makes_it(
    tiny, monkeypatch: pytest.MonkeyPatch, word_of_it: bool
) -> None:
    """The disk is full: nothing more fits into the log or the ledger, nor, maybe, into what standard error goes to."""
    full = OSError(28, "No space left on device")

    def refuse(self, record: dict[str, Any]) -> None:
        if record.get("step", 99) > 6:
            raise full

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise full

    for what in ("train", "ledger"):
        original = getattr(RunLog, what)
        monkeypatch.setattr(RunLog, what, lambda self, record, on=original: refuse(self, record) or on(self, record))
    if not word_of_it:
        monkeypatch.setattr("sys.stderr", Full())
    assert train(tiny) == 74
    assert (tiny.run_dir / "LOCK").exists()
    assert read_jsonl(tiny.run_dir / "ledger.jsonl") == []
    monkeypatch.undo()
    lost, finished = recorded_by_the_next_one(tiny)
    assert (lost["stop_reason"], lost["from_step"], lost["to_step"], lost["saved_step"]) == ("disk_full", 0, 6, 4)
    assert (lost["exit_code"], lost["error"]) == (74, "OSError: [Errno 28] No space left on device")
    assert (lost["lost_steps"], finished["from_step"], finished["exit_code"]) == (2, 4, 0)


def test_save_that_ends_on_a_disk_grown_full_since_costs_the_record_no_word(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more fits from step 7 on, not even the line that the save of step 6, in the background, has ended."""
    append = metrics.append_jsonl

    def refuse(path: Path, record: dict[str, Any]) -> None:
        if path.name == "ledger.jsonl" or record.get("step") == 7 or record.get("kind") == "save":
            raise OSError(28, "No space left on device")
        append(path, record)

    tiny.set(save_every_steps=6)
    monkeypatch.setattr(metrics, "append_jsonl", refuse)
    assert train(tiny) == 74
    monkeypatch.undo()
    lost, _ = recorded_by_the_next_one(tiny)
    assert (lost["stop_reason"], lost["to_step"], lost["saved_step"], lost["lost_steps"]) == ("disk_full", 6, 6, 0)
