import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model import checkpoint
from model.checkpoint import KEYS
from model.config import CoreConfig, TrainConfig
from model.errors import CheckpointError, DiskSpaceError
from model.rqwen3 import RQwen3

SMALL = CoreConfig(
    vocab_size=50,
    d_model=16,
    n_layer=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_seq_len=16,
)
TRAINING = TrainConfig(max_steps=1000, seq_len=8, micro_batch_size=1)


def state(step: int) -> dict[str, Any]:
    model = RQwen3(SMALL)
    model.initialise(step)
    return {
        "step": step,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "scheduler_state_dict": {"last_step": step},
        "loss_history": [1.5] * step,
        "data_offset": step * 8,
    }


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if kind == "bitflip":
        data[middle] ^= 0xFF
    elif kind == "zero_tail":
        data[middle:] = bytes(len(data) - middle)
    else:
        data = data[: {"empty": 0, "first_byte": 1, "half": middle, "minus_one": len(data) - 1}[kind]]
    path.write_bytes(bytes(data))


def test_save_gives_six_keys_that_load_safely_and_a_sidecar_that_agrees(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path / "step_3.pt", state(3), {"job_id": "7"})
    again = torch.load(saved.path, weights_only=True)
    assert tuple(sorted(again)) == tuple(sorted(KEYS))
    assert all(torch.equal(again["model_state_dict"][n], t) for n, t in state(3)["model_state_dict"].items())
    sidecar = json.loads((tmp_path / "step_3.json").read_text())
    assert (sidecar["step"], sidecar["job_id"], sidecar["bytes"]) == (3, "7", saved.path.stat().st_size)
    assert checkpoint.verify(saved.path) == saved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3.json", "step_3.pt"]


@pytest.mark.parametrize("kind", ["empty", "first_byte", "half", "minus_one", "zero_tail", "bitflip"])
def test_newest_good_passes_over_a_damaged_newest_aloud(tmp_path: Path, kind: str) -> None:
    for step in (900, 1000):
        checkpoint.save(checkpoint.step_path(tmp_path, step), state(step % 7), {})
    sidecar = json.loads((tmp_path / "step_1000.json").read_text())
    damage(tmp_path / "step_1000.pt", kind)
    told: list[str] = []
    found = checkpoint.newest_good(tmp_path, told.append)
    assert found is not None
    assert found.path.name == "step_900.pt"
    assert len(told) == 1
    assert "step_1000.pt" in told[0]
    assert sidecar["bytes"]


def test_newest_good_passes_over_one_without_sidecar(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(checkpoint.step_path(tmp_path, step), state(step), {})
    (tmp_path / "step_2.json").unlink()
    told: list[str] = []
    found = checkpoint.newest_good(tmp_path, told.append)
    assert found is not None
    assert found.step == 1
    assert "sidecar" in told[0]


def test_newest_is_chosen_by_number_among_stray_files(tmp_path: Path) -> None:
    for step in (500, 2500, 9000, 10000):
        checkpoint.save(checkpoint.step_path(tmp_path, step), state(1) | {"step": step}, {})
    strays = "step_.pt step_latest.pt step_11000.pt.bak step_12000.pt.part .step_40000.pt.swp notes.txt"
    for name in [*strays.split(), "weights_step_30000.pt"]:
        (tmp_path / name).write_text("x")
    (tmp_path / "step_50000.pt").mkdir()
    told: list[str] = []
    found = checkpoint.newest_good(tmp_path, told.append)
    assert found is not None
    assert (found.step, told) == (10000, [])
    assert checkpoint.newest_good(tmp_path / "missing") is None


def test_save_that_fails_leaves_the_older_ones_and_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "step_1.pt", state(1), {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"step_2\.pt: could not be written .*No space left"):
        checkpoint.save(tmp_path / "step_2.pt", state(2), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1.json", "step_1.pt"]


def test_save_without_room_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "tensor_bytes", lambda value: 2**55)
    with pytest.raises(DiskSpaceError, match=r"checkpoint step_2\.pt needs"):
        checkpoint.save(tmp_path / "step_2.pt", state(2), {})
    assert list(tmp_path.iterdir()) == []


def test_save_of_other_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint holds step"):
        checkpoint.save(tmp_path / "step_1.pt", {"step": 1}, {})


def test_save_final_shares_the_bytes_of_the_last_step(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path / "step_3.pt", state(3), {})
    for _ in range(2):
        final = checkpoint.save_final(saved)
    assert final.path.name == "final.pt"
    assert final.path.stat().st_ino == saved.path.stat().st_ino
    assert checkpoint.verify(final.path).step == 3
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["final.json", "final.pt", "step_3.json", "step_3.pt"]


@pytest.mark.parametrize(
    ("steps", "changes", "deleted"),
    [
        ([1000, 2000, 3000], {"keep_last": 1, "keep_first_step": 0}, [1000, 2000]),
        ([9000, 10000], {"keep_last": 1, "keep_every_steps": 50_000}, [9000]),
        ([1000, 5000, 6000, 7000, 8000, 9000], {}, [6000]),
        ([1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000], {}, [2000, 3000, 4000]),
        ([1000], {"keep_last": 1}, []),
        ([], {}, []),
    ],
)
def test_retention_lets_go_what_the_rule_says(steps: list[int], changes: dict[str, int], deleted: list[int]) -> None:
    assert checkpoint.to_delete(steps, dataclasses.replace(TRAINING, **changes)) == deleted


def test_prune_does_not_count_a_damaged_file_as_one_of_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved = checkpoint.save(checkpoint.step_path(tmp_path, step), state(step), {})
    damage(tmp_path / "step_2.pt", "half")
    config = dataclasses.replace(TRAINING, keep_last=2, keep_first_step=0)
    assert checkpoint.prune(tmp_path, config, saved) == []
    assert checkpoint.steps_in(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("renames", range(4))
def test_save_killed_at_any_rename_leaves_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    for step in (1, 2):
        saved = checkpoint.save(checkpoint.step_path(tmp_path, step), state(step), {})
    original, left = Path.replace, iter([True] * renames + [False] * 99)

    def replace(self: Path, target: Path) -> Path:
        if not next(left):
            raise KeyboardInterrupt  # as far as a kill: nothing after it runs but the removal of the temporary file
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with contextlib.suppress(KeyboardInterrupt):
        saved = checkpoint.save(checkpoint.step_path(tmp_path, 3), state(3), {})
        checkpoint.save_final(saved)
    monkeypatch.undo()
    told: list[str] = []
    found = checkpoint.newest_good(tmp_path, told.append)
    assert found is not None
    assert (found.step, told) == (3 if renames >= 2 else 2, [])
    assert checkpoint.steps_in(tmp_path) == ([1, 2, 3] if renames >= 2 else [1, 2])


def test_prune_removes_a_sidecar_without_its_file(tmp_path: Path) -> None:
    for step in (1, 2):
        saved = checkpoint.save(checkpoint.step_path(tmp_path, step), state(step), {})
    (tmp_path / "step_1.pt").unlink()
    assert checkpoint.prune(tmp_path, TRAINING, saved) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2.json", "step_2.pt"]


def test_load_model_gives_the_saved_weights(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "step_3.pt", state(3), {})
    model = checkpoint.load_model(tmp_path / "step_3.pt", SMALL)
    assert not model.training
    assert torch.equal(model.lm_head.weight, state(3)["model_state_dict"]["lm_head.weight"])


def test_load_model_of_another_shape_gives_one_clear_message(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "step_3.pt", state(3), {})
    with pytest.raises(CheckpointError, match=r"do not fit the model of the configuration: 2 misshapen: .* instead of"):
        checkpoint.load_model(tmp_path / "step_3.pt", dataclasses.replace(SMALL, vocab_size=60))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_load_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="not readable as a checkpoint"):
        checkpoint.load(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.load(tmp_path / "b.pt")
