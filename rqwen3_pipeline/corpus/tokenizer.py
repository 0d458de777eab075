"""The tokenizer: pinned by its hash or trained on the corpus.

Either way the run root gets its tokenizer.json, with a stamp; `encoder` encodes with it. Training on
8 million characters costs about ten seconds.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model.errors import ConfigError, CorpusError, SourceError
from model.files import sha256_bytes, sha256_file, write_bytes
from rqwen3_pipeline.corpus.dedup import digest_text, heldout_mask
from rqwen3_pipeline.corpus.encoder import EOS_TOKEN, Encoder
from rqwen3_pipeline.corpus.filtered_file import filtered_batches
from rqwen3_pipeline.corpus.hub import fetch_tokenizer
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import QWEN3_SHA256, CorpusConfig
from rqwen3_pipeline.corpus.stamps import (
    MAKE_TOKENIZER,
    Stamp,
    begin,
    current,
    input_of,
    required_stamp,
    stamp_path,
    verify_inputs,
    write_stamp,
)
from rqwen3_pipeline.settings import RunRoot

__all__ = [
    "EOS_TOKEN",
    "Encoder",
    "current_tokenizer",
    "load_encoder",
    "make_tokenizer",
    "pin_tokenizer",
    "tokenizer_inputs",
    "train_tokenizer",
]

SAMPLE_CHARS = 8_000_000
"""Characters that a tokenizer is trained on, divided among the sources by their shares."""


@functools.lru_cache(maxsize=2)
def _encoder_of(path: Path, sha256: str) -> Encoder:
    data = path.read_bytes()
    if sha256_bytes(data) != sha256:
        raise CorpusError(f"{path}: changed while it was read. Run again: rqwen3 corpus build")
    return Encoder(data)


def load_encoder(root: RunRoot) -> Encoder:
    """The run root's tokenizer; loaded once per process.

    Raises:
        CorpusError: it is not there, or not usable.
    """
    if not root.tokenizer.is_file():
        raise CorpusError(f"{root.tokenizer}: no tokenizer yet. Make it: {MAKE_TOKENIZER}")
    return _encoder_of(root.tokenizer, sha256_file(root.tokenizer))


def pin_tokenizer(root: RunRoot, config: CorpusConfig, file: Path | None, rebuild: bool = False) -> dict[str, Any]:
    """Copy a tokenizer.json into the run root, if it is the one that the configuration pins.

    Args:
        root: the run root.
        config: what the corpus is made of.
        file: the tokenizer.json; None takes it from the Hub or the Hub client's cache.
        rebuild: replace one that other settings made.

    Returns:
        The report: `kind`, `sha256`, `vocab_size`, `eos_id`.

    Raises:
        SourceError: there is no such file and the Hub can't be reached, or its SHA-256 is another.
        ConfigError: it has more ids than the model's embedding has rows.
    """
    expected, settings = config.tokenizer.pinned_sha256, config.settings_for("tokenizer")
    inputs = _pinned_inputs(config)
    stamp = current(root, stamp_path(root.tokenizer), settings, inputs, rebuild)
    if stamp is not None:
        if file is not None and file.is_file():  # one is here already, but what is named is what is meant
            _check_pinned(file, expected)
        return stamp.report
    return _install(root, config, _check_pinned(file or fetch_tokenizer(), expected), settings, inputs, {})


def _pinned_inputs(config: CorpusConfig) -> dict[str, str]:
    return {"tokenizer.json as pinned": config.tokenizer.pinned_sha256}


def current_tokenizer(root: RunRoot, config: CorpusConfig, lock: Lock) -> Stamp | None:
    """The stamp of the run root's tokenizer; None if none is there, or its files have changed.

    Raises:
        CorpusError: it was made with other settings; or a filtered file that one is trained on is not there.
    """
    inputs = _pinned_inputs(config) if config.tokenizer.kind == "pinned" else tokenizer_inputs(root, config, lock)
    return current(root, stamp_path(root.tokenizer), config.settings_for("tokenizer"), inputs)


def _check_pinned(file: Path, expected: str) -> bytes:
    """The bytes of a tokenizer.json, if they are those that are pinned."""
    if not file.is_file():
        raise SourceError(
            f"{file}: no such file; this profile pins a tokenizer.json with SHA-256 {expected[:12]}…. "
            "Name it: make demo SAMPLES=DIR TOKENIZER=FILE, or rqwen3 run --tokenizer FILE"
        )
    data = file.read_bytes()
    if (seen := sha256_bytes(data)) != expected:
        raise SourceError(
            f"{file}: SHA-256 is {seen}, data.tokenizer.sha256 pins {expected}. Use the pinned file, or pin this one."
        )
    return data


def _install(
    root: RunRoot,
    config: CorpusConfig,
    data: bytes,
    settings: dict[str, Any],
    inputs: dict[str, str],
    report: dict[str, Any],
) -> dict[str, Any]:
    encoder = Encoder(data)
    if encoder.sha256 != QWEN3_SHA256:  # of this one it is known, and half a second to ask
        encoder.check_against_library(data)
    if encoder.vocab_size > config.embedding_rows:
        raise ConfigError(
            f"the tokenizer has {encoder.vocab_size} ids, model.vocab_size = {config.embedding_rows}: "
            f"raise model.vocab_size to at least {encoder.vocab_size}, or use a smaller tokenizer"
        )
    begin(stamp_path(root.tokenizer), root.tokenizer)
    write_bytes(root.tokenizer, data)
    facts: dict[str, Any] = {"kind": config.tokenizer.kind, "sha256": encoder.sha256}
    facts |= {"vocab_size": encoder.vocab_size, "eos_id": encoder.eos_id}
    stamp = write_stamp(
        root,
        stamp_path(root.tokenizer),
        stage="tokenizer",
        settings=settings,
        inputs=inputs,
        outputs=[root.tokenizer],
        report=facts | report,
    )
    return stamp.report


def train_tokenizer(root: RunRoot, config: CorpusConfig, lock: Lock, rebuild: bool = False) -> dict[str, Any]:
    """Train a byte-level BPE on a sample of the filtered documents, without the held-out ones.

    The sample takes each source's documents in (lock order, row) until its share of `SAMPLE_CHARS` is
    full, so that the same files give the same tokenizer.

    Returns:
        The report: as `pin_tokenizer`, and `sample_documents`, `sample_chars`.

    Raises:
        CorpusError: a filtered file is missing or damaged.
        ConfigError: the sample gives more ids than the model's embedding has rows.
    """
    settings, inputs = config.settings_for("tokenizer"), tokenizer_inputs(root, config, lock)
    stamp = current(root, stamp_path(root.tokenizer), settings, inputs, rebuild)
    if stamp is not None:
        return stamp.report
    if config.tokenizer.vocab_size is None:
        raise ConfigError('data.tokenizer.kind is not "train"; pin a file instead')
    verify_inputs(root, inputs)
    counts = {"sample_documents": 0, "sample_chars": 0}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] a property of the library
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=config.tokenizer.vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(root, config, lock, counts), trainer=trainer)
    tokenizer.add_special_tokens([EOS_TOKEN])
    return _install(root, config, tokenizer.to_str().encode("utf-8"), settings, inputs, counts)


def _allowances(config: CorpusConfig) -> dict[str, int]:
    whole = sum(source.share for source in config.sources.values())
    return {name: max(1, int(SAMPLE_CHARS * source.share / whole)) for name, source in config.sources.items()}


def tokenizer_inputs(root: RunRoot, config: CorpusConfig, lock: Lock) -> dict[str, str]:
    """The filtered files that a trained tokenizer's sample comes from.

    Raises:
        CorpusError: one of them is not made yet.
    """
    inputs: dict[str, str] = {}
    for source, allowance in _allowances(config).items():
        chars = 0
        for file in lock.files(source):
            if chars >= 2 * allowance:
                break  # at most half of the documents are held out, so the files so far fill the sample
            path = root.filtered(source, file.key)
            stamp = required_stamp(stamp_path(path), str(path))
            inputs |= input_of(root, stamp, path)
            chars += stamp.report["kept_chars"]
    return inputs


def _sample(root: RunRoot, config: CorpusConfig, lock: Lock, counts: dict[str, int]) -> Iterator[str]:
    inputs = tokenizer_inputs(root, config, lock)
    for source, allowance in _allowances(config).items():
        paths = [root.filtered(source, file.key) for file in lock.files(source)]
        used = [path for path in paths if path.relative_to(root.path).as_posix() in inputs]
        chars = 0
        for text in (text for path in used for text in _texts(path)):
            digest_ = np.frombuffer(digest_text(text), dtype=np.uint8).reshape(1, -1)
            if heldout_mask(digest_, config.heldout_one_in)[0]:
                continue
            if chars >= allowance:
                break
            chars += len(text)
            counts["sample_documents"] += 1
            counts["sample_chars"] += len(text)
            yield text


def _texts(path: Path) -> Iterator[str]:
    for batch in filtered_batches(path, ["text"]):
        yield from batch.column("text").to_pylist()


def make_tokenizer(
    root: RunRoot, config: CorpusConfig, lock: Lock, file: Path | None, rebuild: bool = False
) -> dict[str, Any]:
    """Pin or train, as the configuration says."""
    if config.tokenizer.kind == "pinned":
        return pin_tokenizer(root, config, file, rebuild)
    return train_tokenizer(root, config, lock, rebuild)
