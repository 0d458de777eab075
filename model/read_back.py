"""Read an export back and compare it with the model it was made of: logits and held-out loss.

Two readers: this project's (`model.published`), whose logits must be the very same, and transformers,
where it is installed, within rounding. Costs three forward passes over 64 tokens, and two over at most
`HELDOUT_TOKENS` held-out tokens a source.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

from model.bits_per_byte import HeldoutStream, document_losses, heldout_streams
from model.checkpoint import load_model
from model.config import RunConfig
from model.errors import CheckpointError
from model.published import load_published
from model.rqwen3 import RQwen3
from model.shard_format import read_manifest

PROBE_TOKENS = 64
HELDOUT_TOKENS = 1024
NOT_RUN = "not run"
"""Stands in a record for the result of a comparison that was not made."""
ROUNDING = 1e-5
"""Largest difference of a logit between two programs, relative to the largest logit; fp32."""


def read_back(folder: Path, model: RQwen3, checkpoint: Path, run: RunConfig, manifest: Path | None) -> dict[str, Any]:
    """Compare a written export with the model whose weights were written.

    Args:
        folder: the export, its tensors compared already.
        model: in fp32, its weights rounded as they were written.
        checkpoint: where they come from, unrounded.
        run: the configuration.
        manifest: of the corpus; None compares no held-out loss.

    Returns:
        `tensors`; `logits_difference` and `transformers_logits_difference` (largest, absolute); `heldout_loss` of the
        export, `heldout_loss_of_checkpoint`, `heldout_tokens`. `NOT_RUN` stands for what takes transformers, or a
        manifest, where there is none.

    Raises:
        CheckpointError: logits differ.
    """
    again = load_published(folder)
    difference = logits_difference(model, again)
    if difference != 0.0:
        raise CheckpointError(f"{folder}: its logits differ by {difference:g} from the checkpoint's. Report this.")
    found: dict[str, Any] = {"tensors": len(again.state_dict()), "logits_difference": difference}
    theirs = through_transformers(folder, model)
    found["transformers_logits_difference"] = NOT_RUN if theirs is None else theirs
    losses: dict[str, Any] = {"heldout_loss": NOT_RUN, "heldout_loss_of_checkpoint": NOT_RUN, "heldout_tokens": 0}
    if manifest is not None:
        streams = cut_streams(manifest)
        losses["heldout_loss"], losses["heldout_tokens"] = heldout_loss(again, streams, run)
        del again
        losses["heldout_loss_of_checkpoint"], _ = heldout_loss(load_model(checkpoint, run.model), streams, run)
    return found | losses


def probe(model: RQwen3) -> torch.Tensor:
    """Ids that every embedding has, seeded: int64, shape (1, T)."""
    length = min(PROBE_TOKENS, model.config.max_seq_len)
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_difference(model: RQwen3, other: Any) -> float:
    """Largest absolute difference of the logits of two models over the probe; infinite if any is no number."""
    ids_BT = probe(model)
    theirs = other(ids_BT)
    difference = float((model(ids_BT) - getattr(theirs, "logits", theirs)).abs().max())
    return difference if math.isfinite(difference) else math.inf


@torch.no_grad()
def through_transformers(folder: Path, model: RQwen3) -> float | None:
    """The difference where transformers loads the folder; None where it is not installed.

    Raises:
        CheckpointError: it is more than rounding.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    difference, largest = logits_difference(model, theirs), float(model(probe(model)).abs().max())
    if not difference <= ROUNDING * max(1.0, largest):
        raise CheckpointError(
            f"{folder}: transformers' logits differ by {difference:g} from the checkpoint's, whose largest is "
            f"{largest:g}. This version of transformers computes another model: use the one of constraints.txt."
        )
    return difference


def cut_streams(manifest: Path) -> list[HeldoutStream]:
    """The beginning of each source's held-out documents."""
    return heldout_streams(read_manifest(manifest), HELDOUT_TOKENS)[0]


def heldout_loss(model: RQwen3, streams: list[HeldoutStream], run: RunConfig) -> tuple[float | None, int]:
    """Loss a token in nats over all sources, and the number of tokens; None where that is no number."""
    total, counted = 0.0, 0
    for stream in streams:
        result = document_losses(model, stream, run.training.seq_len, 4)
        assert result is not None  # nobody asked it to stop
        total, counted = total + float(result[0].sum()), counted + int(result[1].sum())
    loss = total / counted if counted else math.nan
    return (loss if math.isfinite(loss) else None), counted
