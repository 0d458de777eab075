"""The tiny run that the torture campaign kills: one epoch of a corpus whose windows are all different.

120 steps of a model of some 100,000 parameters, with a save every 5 steps, an evaluation and a sample
every 8, written in a second. Every window of the corpus is needed exactly once.
"""

import random
import string
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.files import sha256_file, write_json
from model.shard_format import docs_path

EOS_ID, SEQ_LEN, STEPS, SEQUENCES = 256, 32, 120, 6
CONFIG = """
[run]
name = "torture"

[model]
vocab_size = 272
d_model = 64
n_layer = 2
num_heads = 4
num_kv_heads = 2
head_dim = 16
intermediate_size = 128
max_seq_len = 64
dropout = 0.1

[training]
max_steps = {steps}
seq_len = {seq_len}
micro_batch_size = 2
accumulation = 3
learning_rate = 1e-2
min_learning_rate = 1e-3
warmup_steps = 10
log_every_steps = 1
save_every_steps = 5
keep_last = 3
keep_every_steps = 50
keep_first_step = 5
eval_every_steps = 8
eval_max_tokens = {eval_max_tokens}
sample_every_steps = 8
sample_prompt = "the "
sample_new_tokens = 12
device = "cpu"
background_save = {background_save}
compile_on_cpu = {compile_on_cpu}
"""


def write_config(
    path: Path, *, background_save: bool, compile_on_cpu: bool = False, eval_max_tokens: int = 600
) -> Path:
    """Write the configuration; what is chosen here may change between submissions."""
    text = CONFIG.format(
        steps=STEPS,
        seq_len=SEQ_LEN,
        eval_max_tokens=eval_max_tokens,
        background_save=str(background_save).lower(),
        compile_on_cpu=str(compile_on_cpu).lower(),
    )
    path.write_text(text, encoding="utf-8")
    return path


def write_corpus(root: Path) -> Path:
    """Write tokenizer, shards of two sources and held-out documents; returns the manifest's path."""
    root.mkdir(parents=True)
    _tokenizer().save(str(root / "tokenizer.json"))
    draw, windows = random.Random(5), STEPS * SEQUENCES
    of_first = windows * 2 // 3
    first_ = _tokens(draw, of_first * SEQ_LEN + 1)
    cut = len(first_) // 3
    shards = [
        _shard(root, "tokens/wikipedia-00000-00.bin", "wikipedia", first_[:cut]),
        _shard(root, "tokens/wikipedia-00000-01.bin", "wikipedia", first_[cut:]),
        _shard(root, "tokens/textbooks-00000-00.bin", "textbooks", _tokens(draw, (windows - of_first) * SEQ_LEN + 1)),
    ]
    heldout = [
        _shard(root, f"tokens/heldout/{source}-00000-00.bin", source, _tokens(draw, 900), table=True)
        for source in ("wikipedia", "textbooks")
    ]
    tokenizer = {"path": "tokenizer.json", "vocab_size": EOS_ID + 1, "eos_id": EOS_ID}
    tokenizer["sha256"] = sha256_file(root / "tokenizer.json")
    write_json(
        root / "manifest.json", {"format_version": 1, "tokenizer": tokenizer, "shards": shards, "heldout": heldout}
    )
    return root / "manifest.json"


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _tokens(draw: random.Random, tokens: int) -> np.ndarray:
    """Documents of random words, each closed by the end-of-text id; uint32."""
    tokenizer, ids = _tokenizer(), list[int]()
    while len(ids) < tokens - 1:
        words = ("".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 9))) for _ in range(12))
        ids += [*tokenizer.encode(" ".join(words)).ids, EOS_ID]
    return np.array([*ids[: tokens - 1], EOS_ID], dtype="<u4")


def _shard(root: Path, path: str, source: str, tokens_: np.ndarray, *, table: bool = False) -> dict:
    tokens_ = tokens_.copy()
    tokens_[-1] = EOS_ID
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tokens_.tobytes())
    ends = np.flatnonzero(tokens_ == EOS_ID) + 1
    if table:
        text_bytes = np.diff(ends, prepend=0) - 1
        pq.write_table(pa.table({"end": ends.astype(np.uint64), "text_bytes": text_bytes}), docs_path(file))
    entry = {"path": path, "source": source, "tokens": len(tokens_), "tokens_used": len(tokens_)}
    return {**entry, "documents": len(ends), "sha256": sha256_file(file)}
