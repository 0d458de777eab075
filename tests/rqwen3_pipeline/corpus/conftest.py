"""Fixtures over the data of `made`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from model.config import TrainConfig
from model.files import sha256_file
from rqwen3_pipeline.corpus.build import build_corpus
from rqwen3_pipeline.corpus.lock import Lock, lock_folder
from rqwen3_pipeline.corpus.sources import CorpusConfig, corpus_config
from rqwen3_pipeline.settings import RunRoot

from .made import only, prose, run_config, write, write_sources


@pytest.fixture
def config() -> CorpusConfig:
    """The corpus of `run_config`."""
    return corpus_config(run_config())


@pytest.fixture
def make_config() -> Callable[..., CorpusConfig]:
    """Make a corpus configuration with other keys of `[data]`."""
    return lambda **data: corpus_config(run_config(**data))


@pytest.fixture
def training() -> TrainConfig:
    """Twenty steps of eight sequences of 32 tokens."""
    return run_config().training


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The six sources; tests must not change them."""
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def root(tmp_path: Path) -> RunRoot:
    """An empty run root."""
    return RunRoot(tmp_path / "root")


@pytest.fixture
def one_source(tmp_path: Path, root: RunRoot) -> Callable[..., Any]:
    """Lock a folder with one source, in the given files of rows; returns (config, lock)."""

    def make(source: str, *files: list[dict[str, Any]], **data: Any) -> tuple[CorpusConfig, Lock]:
        place = tmp_path / "one"
        for number, rows in enumerate(files):
            write(place / source / f"{number}.parquet", rows)
        config = corpus_config(only(source, data.pop("limits", {}), data))
        return config, lock_folder(root, config, place)

    return make


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE with an end-of-text token and, as Qwen3's has, one that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([prose(i) for i in range(50)], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    tokenizer.add_tokens(["<think>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def pinned(tokenizer_file: Path) -> dict[str, Any]:
    """The keys of `[data]` that pin `tokenizer_file`."""
    return {"tokenizer": {"kind": "pinned", "sha256": sha256_file(tokenizer_file)}}


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[RunRoot, dict[str, Any]]:
    """A build in one process that nothing disturbed, and its report; tests must not change it."""
    run, root = run_config(), RunRoot(tmp_path_factory.mktemp("clean") / "root")
    return root, build_corpus(root, corpus_config(run), run.training, folder)


@pytest.fixture
def built(clean: tuple[RunRoot, dict[str, Any]], root: RunRoot) -> dict[str, Any]:
    """Puts a copy of the clean build into `root`; returns its report."""
    shutil.copytree(clean[0].path, root.path)
    return clean[1]
