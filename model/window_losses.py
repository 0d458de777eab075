"""The loss of every target of one training step, under a checkpoint: what made the curve jump there?

    python -m model.window_losses --step N --checkpoint FILE --config FILE --manifest FILE --out losses.npy

Writes float32, shape (sequences of the step, seq_len), nats: place t of row s is the loss of token
t + 1 of the step's window s. `rqwen3 trace --step N --loss` starts it, and says whose tokens they are.
Costs a forward pass over the step's tokens.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from model.checkpoint import load_model
from model.config import RunConfig, load_run_config
from model.errors import ConfigError, RQwen3Error
from model.files import atomic_path
from model.order import window_numbers
from model.rqwen3 import RQwen3
from model.session import pick_device
from model.shard_format import read_manifest
from model.windows import TokenWindows


def losses_of_step(model: RQwen3, windows: TokenWindows, run: RunConfig, step: int) -> npt.NDArray[np.float32]:
    """Losses of a step's targets; float32, shape (sequences of the step, seq_len).

    Args:
        model: in evaluation mode, on its device.
        windows: the run's data.
        run: its configuration.
        step: from 1.

    Raises:
        ConfigError: the run has no such step.
        CorpusError: a token is no id of the tokenizer.
    """
    training = run.training
    if not 1 <= step <= training.max_steps:
        raise ConfigError(f"--step {step}: the run has the steps 1 to {training.max_steps:,}")
    count, device = training.sequences_per_step, model.lm_head.weight.device
    tokens_SL = torch.from_numpy(windows.read(window_numbers((step - 1) * count, count, len(windows), training.seed)))
    found: list[torch.Tensor] = []
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        for part_BL in tokens_SL.split(training.micro_batch_size):
            part_BL = part_BL.to(device)
            found.append(model.token_losses(part_BL[:, :-1], part_BL[:, 1:]).cpu())
    return torch.cat(found).numpy()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.window_losses", description="Losses of one step's targets.")
    parser.add_argument("--step", type=int, required=True, help="optimiser step, from 1")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the .npy file to write")
    options = parser.parse_args(arguments)
    try:
        run = load_run_config(options.config)
        windows = TokenWindows(read_manifest(options.manifest), run.training.seq_len)
        model = load_model(options.checkpoint, run.model, pick_device(run.training.device))
        losses = losses_of_step(model, windows, run, options.step)
        with atomic_path(options.out) as temporary, temporary.open("wb") as file:
            np.save(file, losses)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
