"""Held-out bits per byte with overlapping windows: each token once, with nearly the whole context before it.

Windows that abut, as in training, give a window's first tokens little to go by. Here each window scores
only its last `stride` tokens (the first one all of its own), so that every token but the stream's first
ones has at least `context - stride` tokens before it. With stride = context both are the same. Costs
context / stride times as much.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from model.bits_per_byte import HeldoutStream, score
from model.errors import ConfigError
from model.likelihood import token_logs
from model.rqwen3 import RQwen3


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a stream.

    Args:
        length: tokens of the stream.
        context: most tokens that the model reads at once.
        stride: tokens that each window after the first scores.

    Yields:
        (start, end, first): the model reads tokens start … end - 1 and is asked for first … end.

    Raises:
        ConfigError: the stride is not within the context.
    """
    if not 1 <= stride <= context:
        raise ConfigError(f"--stride = {stride} must lie in [1, {context}], the context in tokens")
    end = min(context, length - 1)
    if end > 0:
        yield 0, end, 1
    while end < length - 1:
        first, start = end + 1, end + stride - context
        end = min(end + stride, length - 1)
        yield start, end, first


@torch.no_grad()
def sliding_losses(
    model: RQwen3, stream: HeldoutStream, context: int, stride: int, batch: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Summed loss in nats and number of counted tokens of each document."""
    device = model.lm_head.weight.device
    losses_, counted_ = np.zeros(len(stream.text_bytes)), np.zeros(len(stream.text_bytes), np.int64)
    spans = list(windows(len(stream.tokens), context, stride))
    for place in range(0, len(spans), batch):
        chosen = spans[place : place + batch]
        ids_BT = torch.zeros((len(chosen), max(end - start for start, end, _ in chosen)), dtype=torch.int64)
        for row, (start, end, _) in enumerate(chosen):
            ids_BT[row, : end - start] = torch.from_numpy(stream.tokens[start:end])
        hidden_BTD = model.model(ids_BT.to(device))
        hidden_ND = torch.cat([hidden_BTD[row, f - 1 - s : e - s] for row, (s, e, f) in enumerate(chosen)])
        asked_N = np.concatenate([np.arange(first, end + 1) for _, end, first in chosen])
        owner_N = stream.document[asked_N]
        wanted_N = np.flatnonzero(owner_N >= 0)
        if not len(wanted_N):
            continue
        targets_N = torch.from_numpy(stream.tokens[asked_N[wanted_N]]).to(device)
        logs_N, _ = token_logs(model, hidden_ND[torch.from_numpy(wanted_N).to(device)], targets_N)
        np.subtract.at(losses_, owner_N[wanted_N], logs_N.double().numpy())
        np.add.at(counted_, owner_N[wanted_N], 1)
    return losses_, counted_


def sliding_scores(
    model: RQwen3, streams: list[HeldoutStream], context: int, stride: int, batch: int
) -> dict[str, dict]:
    """Scores by source, and over all their documents as `all`; the model is put into evaluation mode and back."""
    training = model.training
    model.eval()
    try:
        parts = {s.source: (*sliding_losses(model, s, context, stride, batch), s.text_bytes) for s in streams}
    finally:
        model.train(training)
    if parts:
        losses_, tokens_, bytes_ = (np.concatenate(column) for column in zip(*parts.values(), strict=True))
        parts["all"] = (losses_, tokens_, bytes_)
    return {source: score(*part) for source, part in parts.items()}
