import re
from pathlib import Path

import pytest
import torch

from model import dry_step
from model.bits_per_byte import heldout_streams
from model.errors import CheckpointError, OutOfMemory, TrainingError
from model.files import read_jsonl
from model.session import TrainSession
from model.windows import TokenWindows


@pytest.fixture
def parts(tiny) -> tuple[TrainSession, list, Path]:
    text = tiny.config_path.read_text().replace("max_seq_len = 64", "max_seq_len = 64\ndropout = 0.2")
    tiny.config_path.write_text(text)
    tiny.run_dir.mkdir(parents=True)
    streams, _ = heldout_streams(tiny.manifest, 400)
    return TrainSession(tiny.config, TokenWindows(tiny.manifest, 32)), streams, tiny.run_dir


def everything(session: TrainSession) -> list[torch.Tensor]:
    moments = [value for entry in session.optimizer.state.values() for value in entry.values()]
    return [torch.get_rng_state(), *(t.clone() for t in session.model.state_dict().values()), *moments]


def test_dry_step_leaves_state_and_random_generator_as_they_were(parts) -> None:
    session, streams, run_dir = parts
    before = everything(session)
    measured = dry_step.take(session, streams, run_dir, lambda: False)
    assert measured is not None
    assert {"step_s", "eval_s", "save_s", "peak_memory_gib", "checkpoint_bytes", "loss"} == set(measured)
    assert all(torch.equal(one, other) for one, other in zip(before, everything(session), strict=True))
    assert all(parameter.grad is None for parameter in session.model.parameters())
    assert (session.step, session.loss_history) == (0, [])
    assert [path.name for path in run_dir.iterdir()] == ["dry_steps.jsonl"]


def test_dry_step_is_made_once_for_each_hardware_and_shape(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    session, streams, run_dir = parts
    first = dry_step.take(session, streams, run_dir, lambda: False)
    assert dry_step.take(session, streams, run_dir, lambda: pytest.fail("asked")) == first
    monkeypatch.setattr(dry_step, "device_memory_bytes", lambda device: 44 * 2**30)
    assert dry_step.take(session, streams, run_dir, lambda: False) != first
    assert [record["hardware"]["memory_gib"] == 44 for record in read_jsonl(run_dir / "dry_steps.jsonl")] == [
        False,
        True,
    ]


@pytest.mark.parametrize("asked", [0, 1, 2, 4])
def test_stop_at_any_moment_of_it_leaves_no_record_and_the_state(parts, asked: int) -> None:
    session, streams, run_dir = parts
    before, answers = everything(session), iter([False] * asked + [True] * 99)
    assert dry_step.take(session, streams, run_dir, lambda: next(answers)) is None
    assert all(torch.equal(one, other) for one, other in zip(before, everything(session), strict=True))
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.64 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory. Tried to allocate 4.64 GiB."),
    ],
)
def test_out_of_memory_is_told_with_the_plan_and_what_takes_less(
    parts, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    session, streams, run_dir = parts

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(TrainSession, "_micro_batch", refuse)
    with pytest.raises(OutOfMemory, match="in the dry step") as caught:
        dry_step.take(session, streams, run_dir, lambda: False)
    told = str(caught.value)
    assert re.search(r"weights 0\.00, gradients 0\.00, moments 0\.00.*peak \d", told)
    assert "micro_batch_size = 2 with accumulation = 4" in told
    assert "training.recompute = true" in told
    assert ("Tried to allocate 4.64 GiB" if str(error) else "MemoryError") in told
    assert list(run_dir.iterdir()) == []


def test_loss_that_is_not_finite_from_the_start_is_refused(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    session, streams, run_dir = parts
    monkeypatch.setattr(TrainSession, "_micro_batch", lambda self, tokens: torch.tensor(float("nan")))
    with pytest.raises(TrainingError, match="fresh model is nan"):
        dry_step.take(session, streams, run_dir, lambda: False)


def test_sidecar_that_can_not_be_written_shows_in_the_dry_step(parts) -> None:
    session, streams, run_dir = parts
    session.run.sections["data"] = {"limit": float("inf")}
    with pytest.raises(ValueError, match="not JSON compliant"):
        dry_step.take(session, streams, run_dir, lambda: False)
    assert list(run_dir.iterdir()) == []


def test_disk_that_takes_no_checkpoint_shows_in_the_dry_step(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    session, streams, run_dir = parts

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        dry_step.take(session, streams, run_dir, lambda: False)
    assert list(run_dir.iterdir()) == []
