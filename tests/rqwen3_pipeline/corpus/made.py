"""Data of the corpus' tests: six tiny sources with planted duplicates, and a configuration for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.config import CoreConfig, RunConfig, TrainConfig
from rqwen3_pipeline.settings import SOURCES, RunRoot

_SENTENCE = """the a of water light energy number cell river proof set field teacher learns because where many seven
theorem graph river stone slowly between naïve café Übung 数学 物理 → ∑ x=y+1 and then follows from it"""
WORDS = _SENTENCE.split()


def prose(seed: int, words: int = 60) -> str:
    """Some text, another one for each seed."""
    picked = np.random.default_rng(seed).choice(WORDS, size=words)
    return f"Document {seed}. " + " ".join(picked.tolist()) + "."


def write(path: Path, rows: list[dict[str, Any]] | pa.Table, schema: pa.Schema | None = None) -> Path:
    """Write rows as parquet, 16 rows a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, path, row_group_size=16)
    return path


def unchecked(*values: bytes) -> pa.Array:
    """A string column of these bytes, whatever they are: what Arrow never looks at when it reads a file."""
    array = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(array), *array.buffers()[1:3])


def question(number: int, question_html: str, answers: list[dict[str, Any]] | None) -> dict[str, Any]:
    """A row of the StackExchange source."""
    return {
        "qid": number,
        "question": question_html,
        "answers": answers,
        "metadata": [f"https://example.org/questions/{number}", "https://example.org", "https://example.org/u/1"],
    }


def answer(number: int, text: str | None, score: int | None = 0, selected: bool | None = False) -> dict[str, Any]:
    """One answer of a row."""
    return {"answer_id": number, "pm_score": score, "selected": selected, "text": text}


def write_sources(folder: Path) -> Path:
    """The six sources: 40 to 60 documents each, fineweb_edu in two files, openwebmath in two folders."""
    shared = prose(900_000)
    web = [
        {"id": f"f{i}", "url": f"https://e.org/{i}", "text": prose(i), "score": 2.6 if i % 7 == 0 else 3.0 + i % 3}
        for i in range(60)
    ]
    web[8]["text"] = web[3]["text"]
    web[40]["text"] = web[3]["text"]
    web[10]["text"] = shared + " " + prose(1, 100)
    write(folder / "fineweb-edu" / "a.parquet", web[:32])
    write(folder / "fineweb-edu" / "b.parquet", web[32:])
    pages = [{"id": str(i), "url": f"w/{i}", "title": f"T{i}", "text": prose(1000 + i, 130)} for i in range(40)]
    pages[5] |= {"title": "Ada", "text": "Ada may refer to:\n\n" + "\n".join(f"Ada {i}, a town" for i in range(60))}
    pages[6]["text"] = web[10]["text"]
    write(folder / "wikipedia.parquet", pages)
    for part in ("x", "y"):
        math = [{"url": f"m/{part}{i}", "text": prose(hash_free(part) + i, 70)} for i in range(24)]
        write(folder / "openwebmath" / part / "p.parquet", math)
    threads = [
        question(
            i, f"<p>{prose(4000 + i)}</p>", [answer(2 * i, f"<p>{prose(5000 + i)}</p>", 1), answer(2 * i + 1, "x", 0)]
        )
        for i in range(40)
    ]
    write(folder / "stackexchange.parquet", [*threads, question(99, "<p>alone</p>", [])])
    write(folder / "pes2o.parquet", [{"content": prose(6000 + i, 260)} for i in range(40)])
    write(folder / "textbooks.parquet", [{"text": prose(7000 + i), "prompt": "p", "format": "f"} for i in range(40)])
    return folder


def hash_free(part: str) -> int:
    """A number for a part's name that is the same in every process."""
    return 2000 + 500 * ord(part)


def run_config(**data: Any) -> RunConfig:
    """A run with a trained tokenizer; `data` overrides keys of `[data]`."""
    section: dict[str, Any] = {"heldout_one_in": 5, "shard_max_tokens": 4000, "oracle_documents": 3}
    section |= {"tokenizer": {"kind": "train", "vocab_size": 400}} | {name: {} for name in SOURCES} | data
    shape = {"d_model": 8, "n_layer": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 8}
    return RunConfig(
        name="t",
        model=CoreConfig(vocab_size=400, max_seq_len=32, **shape),
        training=TrainConfig(max_steps=20, warmup_steps=2, seq_len=32, micro_batch_size=4, accumulation=2),
        sections={"data": section},
    )


def tree(root: RunRoot) -> dict[str, bytes]:
    """Every file below a run root that is not hidden, by its path."""
    files = (path for path in sorted(root.path.rglob("*")) if path.is_file())
    return {path.relative_to(root.path).as_posix(): path.read_bytes() for path in files}


def only(source: str, limits: dict[str, Any], data: dict[str, Any]) -> RunConfig:
    """A run with a single source, whose keys are `limits`."""
    run = run_config(**data)
    section = {key: value for key, value in run.sections["data"].items() if key not in SOURCES}
    return RunConfig(
        name=run.name, model=run.model, training=run.training, sections={"data": section | {source: limits}}
    )
