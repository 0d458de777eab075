"""Generate text from a checkpoint, with keys and values of earlier tokens kept.

Greedy by default, else by temperature and top-p (Holtzman et al. 2020). Stops at the end-of-text id.
Rows of the embedding beyond the tokenizer's ids are never chosen. Costs one forward pass over the
prompt, then one per token, and 2 · n_layer · K · H · 4 bytes of cache a token.

    python -m model.generate --checkpoint FILE --config FILE --tokenizer FILE --prompt TEXT
    python -m model.generate --weights DIR --prompt TEXT
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from model.checkpoint import load_model
from model.config import load_run_config
from model.errors import ConfigError, CorpusError, RQwen3Error
from model.published import end_of_text_ids, load_published, read_config
from model.rqwen3 import RQwen3

EOS_TOKEN = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    new_tokens: int = 60
    """At most this many."""
    temperature: float = 0.0
    """0 takes the likeliest; above, the logits are divided by it."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the choice."""

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise ConfigError(f"--new-tokens = {self.new_tokens} must be at least 1")
        if self.temperature < 0.0:
            raise ConfigError(f"--temperature = {self.temperature} must not be negative")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"--top-p = {self.top_p} must lie in (0, 1]")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        CorpusError: it is missing, or no tokenizer.
    """
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise CorpusError(
            f"{path}: not readable as a tokenizer ({error}). Name the run root's tokenizer.json."
        ) from error


@torch.no_grad()
def generate(
    model: RQwen3,
    prompt: list[int],
    vocab_size: int,
    eos_id: int | frozenset[int],
    sampling: Sampling,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: its mode is left as it was.
        prompt: token ids; empty means the (lowest) end-of-text id. Its tail is used if it is too long.
        vocab_size: ids of the tokenizer; none at or above is chosen.
        eos_id: ends the text, or any of these do; it is not returned.
        sampling: how to choose; it has its own random generator, so no other is moved.
        should_stop: asked before each id.

    Returns:
        The new ids; fewer than asked for at the end of text or of the model's context, or when told to stop.

    Raises:
        ConfigError: there is neither a prompt nor an id to begin with.
    """
    limit = model.config.max_seq_len
    ends = frozenset((eos_id,)) if isinstance(eos_id, int) else eos_id
    if not prompt and not ends:
        raise ConfigError("--prompt is empty, and this model has no end-of-text id to begin with. Give a prompt.")
    prompt = (prompt or [min(ends)])[-max(1, limit - sampling.new_tokens) :]
    device = model.lm_head.weight.device
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    caches = model.new_caches(1, min(limit, len(prompt) + sampling.new_tokens))
    training, new_ids = model.training, list[int]()
    model.eval()
    try:
        ids_BT = torch.tensor([prompt], device=device)
        while len(new_ids) < sampling.new_tokens and caches[0].length + ids_BT.shape[1] <= limit:
            if should_stop():
                break
            hidden_BTD = model.model(ids_BT, caches)
            logits_V = model.lm_head(hidden_BTD[0, -1]).float()[:vocab_size]
            chosen = choose(logits_V, sampling, generator)
            if chosen in ends:
                break
            new_ids.append(chosen)
            ids_BT = torch.tensor([[chosen]], device=device)
    finally:
        model.train(training)
    return new_ids


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One id from the logits."""
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    probabilities_V, order_V = torch.softmax(logits_V / sampling.temperature, -1).sort(descending=True, stable=True)
    likelier_V = probabilities_V.cumsum(-1) - probabilities_V
    probabilities_V[likelier_V >= sampling.top_p] = 0.0
    return int(order_V[torch.multinomial(probabilities_V, 1, generator=generator)])


def continue_text(
    model: RQwen3,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """The model's continuation of a text, without the prompt; cut short when told to stop.

    Raises:
        CorpusError: the tokenizer has no end-of-text token.
    """
    eos_id = tokenizer.token_to_id(EOS_TOKEN)
    if eos_id is None:
        raise CorpusError(f"the tokenizer has no token {EOS_TOKEN}. Use the tokenizer.json of the run root.")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    new_ids = generate(model, ids, tokenizer.get_vocab_size(with_added_tokens=True), eos_id, sampling, should_stop)
    return tokenizer.decode(new_ids)


def continue_published(folder: Path, prompt: str, sampling: Sampling, device: str) -> str:
    """The continuation that a published folder's model and tokenizer give, without the prompt.

    Raises:
        RQwen3Error: the folder can't be used, or its tokenizer has more ids than the embedding has rows.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids, rows = tokenizer.get_vocab_size(with_added_tokens=True), read_config(folder).vocab_size
    if ids > rows:
        raise ConfigError(
            f"{folder}: vocab_size = {rows:,} rows of the embedding, but tokenizer.json has {ids:,} ids. "
            "They are not of one model: fetch the folder again."
        )
    model = load_published(folder, device)
    prompt_ids = tokenizer.encode(prompt).ids
    return tokenizer.decode(generate(model, prompt_ids, ids, end_of_text_ids(folder), sampling))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.generate", description="Continue a prompt.")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a published folder; or the next three:")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.weights is None and None in (options.checkpoint, options.config, options.tokenizer):
        parser.error("give --weights, or --checkpoint, --config and --tokenizer")
    try:
        sampling = Sampling(
            new_tokens=options.new_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
        )
        if options.weights is not None:
            text = continue_published(options.weights, options.prompt, sampling, options.device)
        else:
            model = load_model(options.checkpoint, load_run_config(options.config).model, options.device)
            text = continue_text(model, load_tokenizer(options.tokenizer), options.prompt, sampling)
        print(options.prompt + text)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
