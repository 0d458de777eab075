"""Log-likelihoods of continuations under the model, and multiple choice scored by them.

`acc` takes the choice of the highest summed log-likelihood, `acc_norm` the one of the highest per
character, ties the first: the definitions of lm-evaluation-harness 0.4 (`acc_norm` there divides by
characters, not by bytes). Costs one forward pass per choice over its context, one for all choices of a single token;
logits exist only for the continuation's tokens.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from model.errors import ConfigError, CorpusError
from model.memory import head_chunk_tokens
from model.rqwen3 import RQwen3

DELIMITER = " "
"""Joins a choice to its context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClozeItem:
    """One multiple-choice question."""

    id: str
    """Unique in its file."""
    source: str
    """Name of the source that its document is from."""
    context: str
    """What the choices continue."""
    choices: tuple[str, ...]
    """At least two texts."""
    gold: int
    """Index of the true one."""


def read_items(path: Path) -> list[ClozeItem]:
    """Read a file of questions, one JSON object a line.

    Raises:
        CorpusError: the file is missing or empty, or a line is no question; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # U+2028 ends no line here
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: the cloze questions can't be read ({error}). Write them again.") from error
    items = [_item(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line or len(lines) > 1]
    if not items:
        raise CorpusError(f"{path}: holds no question. Write them again from the held-out documents.")
    return items


def _item(line: str, where: str) -> ClozeItem:
    try:
        raw = json.loads(line)
        item = ClozeItem(
            id=str(raw["id"]),
            source=str(raw["source"]),
            context=str(raw["context"]),
            choices=tuple(str(choice) for choice in raw["choices"]),
            gold=int(raw["gold"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{where}: not a cloze question ({error!r}). Write the file again.") from error
    if len(item.choices) < 2 or not all(item.choices) or not 0 <= item.gold < len(item.choices):
        raise CorpusError(
            f"{where}: {len(item.choices)} choices and gold = {item.gold}; at least two non-empty choices and a gold "
            "among them were expected. Write the file again."
        )
    return item


def plain_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer without its added tokens: `<|endoftext|>` in a text stays text, as in the corpus.

    Raises:
        CorpusError: the file is missing, or no tokenizer.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["added_tokens"] = []
        return Tokenizer.from_str(json.dumps(content))
    except Exception as error:
        raise CorpusError(f"{path}: not readable as a tokenizer ({error}). Build it: rqwen3 corpus build") from error


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, eos_id: int) -> tuple[list[int], list[int]]:
    """Token ids of a context and of what follows it, split where the context's own tokens end.

    White space at the context's end counts for the continuation; an empty context is the
    end-of-text id.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        return [eos_id], tokenizer.encode(continuation, add_special_tokens=False).ids
    context_ids = tokenizer.encode(kept, add_special_tokens=False).ids
    whole_ids = tokenizer.encode(kept + continuation, add_special_tokens=False).ids
    return context_ids, whole_ids[len(context_ids) :]


@torch.no_grad()
def log_likelihoods(
    model: RQwen3, pairs: Sequence[tuple[list[int], list[int]]], batch: int
) -> list[tuple[float, bool]]:
    """Summed log-likelihood of each continuation given its context, in nats, fp32 sums.

    Args:
        model: its mode is left as it was.
        pairs: ids of context and continuation; the oldest of the context are dropped beyond
            `max_seq_len`.
        batch: sequences per forward pass; padded behind their end, which no earlier token sees.

    Returns:
        In the order of the pairs: the log-likelihood, and whether each token was the likeliest.

    Raises:
        ConfigError: a continuation is longer than the model's context.
    """
    limit = model.config.max_seq_len
    for context_ids, continuation_ids in pairs:
        if not context_ids or not 0 < len(continuation_ids) <= limit:
            raise ConfigError(
                f"a continuation of {len(continuation_ids)} tokens after {len(context_ids)} can't be scored with "
                f"model.max_seq_len = {limit}. Ask shorter questions, or evaluate a model of longer context."
            )
    read: dict[tuple[int, ...], list[int]] = {}  # what the model reads, and the pairs that are scored by it
    for index, (context_ids, continuation_ids) in enumerate(pairs):
        read.setdefault(tuple((context_ids + continuation_ids)[-limit - 1 : -1]), []).append(index)
    inputs = sorted(read, key=lambda ids: -len(ids))
    results: list[tuple[float, bool]] = [(math.nan, False)] * len(pairs)
    training = model.training
    model.eval()
    try:
        for first in range(0, len(inputs), batch):
            chosen = inputs[first : first + batch]
            members = [(row, index) for row, ids in enumerate(chosen) for index in read[ids]]
            scored = _batch(model, chosen, [(row, pairs[index][1]) for row, index in members])
            for (_, index), result in zip(members, scored, strict=True):
                results[index] = result
    finally:
        model.train(training)
    return results


def _batch(
    model: RQwen3, inputs: list[tuple[int, ...]], continuations: list[tuple[int, list[int]]]
) -> list[tuple[float, bool]]:
    """Score continuations, each given with the row of the input whose end predicts it."""
    device = model.lm_head.weight.device
    ids_BT = torch.zeros((len(inputs), max(map(len, inputs))), dtype=torch.int64)
    for row, ids in enumerate(inputs):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    hidden_BTD = model.model(ids_BT.to(device))
    wanted = [hidden_BTD[row, len(inputs[row]) - len(ids) : len(inputs[row])] for row, ids in continuations]
    targets_N = torch.tensor([token for _, ids in continuations for token in ids], device=device)
    logs_N, likeliest_N = token_logs(model, torch.cat(wanted), targets_N)
    lengths = [len(ids) for _, ids in continuations]
    return [
        (float(logs.double().sum()), bool(likeliest.all()))
        for logs, likeliest in zip(logs_N.split(lengths), likeliest_N.split(lengths), strict=True)
    ]


def token_logs(model: RQwen3, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target in fp32 on the CPU, and whether it is the likeliest; a chunk at a time."""
    step = head_chunk_tokens(model.config.vocab_size, len(targets_N), cuda=hidden_ND.device.type == "cuda")
    logs: list[torch.Tensor] = []
    likeliest: list[torch.Tensor] = []
    for start in range(0, len(targets_N), step):
        logits_NV = model.lm_head(hidden_ND[start : start + step]).float()
        targets = targets_N[start : start + step]
        logs.append(logits_NV.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1).cpu())
        likeliest.append((logits_NV.argmax(-1) == targets).cpu())
    return torch.cat(logs), torch.cat(likeliest)


def score_cloze(
    model: RQwen3, tokenizer: Tokenizer, items: Sequence[ClozeItem], eos_id: int, batch: int
) -> dict[str, Any]:
    """`acc`, `acc_norm` and their standard errors over the questions; null with a `reason` if not finite."""
    pairs = [encode_pair(tokenizer, item.context, DELIMITER + text, eos_id) for item in items for text in item.choices]
    logs = [log for log, _ in log_likelihoods(model, pairs, batch)]
    right: list[float] = []
    right_norm: list[float] = []
    place = 0
    for item in items:
        own = logs[place : place + len(item.choices)]
        place += len(item.choices)
        right.append(float(_best(own) == item.gold))
        per_character = [log / len(text) for log, text in zip(own, item.choices, strict=True)]
        right_norm.append(float(_best(per_character) == item.gold))
    scores = {
        "acc": _mean(right),
        "acc_stderr": _stderr(right),
        "acc_norm": _mean(right_norm),
        "acc_norm_stderr": _stderr(right_norm),
    }
    return finished_scores(scores, [len(item.choices) for item in items], logs)


def finished_scores(scores: dict[str, float | None], choices: Sequence[int], logs: Sequence[float]) -> dict[str, Any]:
    """Scores with `n` and `chance`; what is not a finite number becomes null, and a `reason` says why.

    Args:
        scores: by name.
        choices: how many answers each question offers; 0 where a word is to be found, which nobody guesses.
        logs: every log-likelihood that the scores come from.
    """
    counted = {"n": len(choices), "chance": _mean([1 / count if count else 0.0 for count in choices])}
    lost = sum(not math.isfinite(log) for log in logs)
    if lost:
        reason = f"{lost} of {len(logs)} log-likelihoods are not finite: the checkpoint's weights hold NaN or infinity"
        return dict.fromkeys(scores) | counted | {"reason": reason}
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in scores.items()}
    if None in finite.values():
        return finite | counted | {"reason": f"no standard error can be had from {len(choices)} question(s)"}
    return finite | counted


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean, from the sample's deviation; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
