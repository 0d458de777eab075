"""Which documents made the loss of a step: `rqwen3 trace --step N --loss`.

The trainer's half computes the loss of every target under a checkpoint, in a process of its own; here
its tokens are given back to their documents. A mean over few tokens says little, so their number
stands beside it. Costs a forward pass over the step, and one reading of the document tables it touches.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from model.errors import CheckpointError
from model.shard_format import read_manifest
from rqwen3_pipeline.corpus.trace import DocumentLoss, document_losses
from rqwen3_pipeline.programs import run_program
from rqwen3_pipeline.settings import Settings

_STEP = re.compile(r"step_(\d+)\.pt")


def nearest_checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint whose weights are nearest to those that a step began with, an earlier one if two are.

    Raises:
        CheckpointError: there is none with its sidecar.
    """
    steps = [int(match[1]) for path in folder.glob("step_*.pt") if (match := _STEP.fullmatch(path.name))]
    whole = [found for found in steps if (folder / f"step_{found}.json").exists()]
    if not whole:
        raise CheckpointError(f"{folder}: no checkpoint there to compute losses with. Name one: --checkpoint FILE")
    return folder / f"step_{min(whole, key=lambda found: (abs(found - (step - 1)), found))}.pt"


def documents_by_loss(settings: Settings, step: int, checkpoint: Path | None) -> tuple[Path, list[DocumentLoss]]:
    """The documents of a step, the worst first, and the checkpoint that says so.

    Args:
        settings: the settings in force.
        step: from 1.
        checkpoint: the weights to use; the run's nearest by default.

    Raises:
        CheckpointError: there is no checkpoint.
        ConfigError: the run has no such step.
        ProgramFailedError: the losses could not be computed; the message holds the end of the log.
    """
    root, run = settings.root, settings.run_config
    folder = root.experiment(run.name)
    used = checkpoint or nearest_checkpoint(folder / "checkpoints", step)
    manifest = read_manifest(root.manifest)
    with tempfile.TemporaryDirectory(prefix="rqwen3-") as scratch:
        out = Path(scratch) / "losses.npy"
        run_program(
            "model.window_losses",
            [
                *("--step", str(step), "--checkpoint", used, "--config", folder / "config.toml"),
                *("--manifest", root.manifest, "--out", out),
            ],
            folder / "logs" / "trace.log",
        )
        losses = np.load(out)
    return used, document_losses(root, manifest, run.training, step, losses)


def table(found: Sequence[DocumentLoss]) -> str:
    """The documents as text, one a line."""
    lines = [f"{'loss':>8} {'tokens':>6} {'sequence':>8}  {'source':<14} document"]
    for one in found:
        loss = f"{one.loss:.4f}" if np.isfinite(one.loss) else str(one.loss)
        where = f"{one.document.id}  {one.document.url}".strip()
        lines.append(f"{loss:>8} {one.targets:>6} {one.sequence:>8}  {one.document.source:<14} {where}")
    return "\n".join(lines)
