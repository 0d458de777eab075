"""The six sources published on a loopback Hub, and what speaks to it: children with the real clients."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rqwen3_pipeline.settings import RunRoot
from tests.loopback_hub import LoopbackHub
from tests.rqwen3_pipeline.corpus.made import prose, question, write

FINEWEB, STACK = "HuggingFaceFW/fineweb-edu", "HuggingFaceH4/stack-exchange-preferences"
WIKIPEDIA, MATH = "wikimedia/wikipedia", "open-web-math/open-web-math"
PES2O, TEXTBOOKS = "MaLA-LM/peS2o-final", "HuggingFaceTB/cosmopedia"
FINEWEB_FILES = 10
SITES = ("stackoverflow.com", "math.stackexchange.com", "stats.stackexchange.com", "cooking.stackexchange.com")

PROFILE = """
[run]
name = "t"
[data]
origin = "hub"
heldout_one_in = 5
oracle_documents = 3
[data.tokenizer]
kind = "train"
vocab_size = 400
[data.fineweb_edu]
[data.wikipedia]
[data.openwebmath]
[data.stackexchange]
[data.pes2o]
[data.textbooks]
[model]
vocab_size = 400
d_model = 8
n_layer = 1
num_heads = 1
num_kv_heads = 1
head_dim = 8
intermediate_size = 8
max_seq_len = 32
[training]
max_steps = 20
warmup_steps = 2
seq_len = 32
micro_batch_size = 4
accumulation = 2
"""

TINY = PROFILE.replace(
    "[data.wikipedia]\n[data.openwebmath]\n[data.stackexchange]\n[data.pes2o]\n[data.textbooks]\n", ""
)
"""Only FineWeb-Edu, and all of its files."""
ALL_WEB = TINY.replace("[data.fineweb_edu]", "[data.fineweb_edu]\ntokens_per_byte = 0.00001")


def card(**configs: str) -> bytes:
    """A data set's card with configurations, each a pattern of files."""
    lines = ["---", "configs:"]
    for name, pattern in configs.items():
        lines += [f"- config_name: {name.replace('__', '.')}", "  data_files:", "  - split: train"]
        lines += [f"    path: {pattern}"]
    return "\n".join([*lines, "---", "# A data set", ""]).encode()


def parquet(tmp_path: Path, rows: list[dict[str, Any]]) -> bytes:
    """Bytes of a parquet file."""
    return write(tmp_path / "file.parquet", rows).read_bytes()


def web(number: int, documents: int = 30) -> list[dict[str, Any]]:
    """Rows of one FineWeb-Edu file."""
    return [
        {"id": f"f{number}-{i}", "url": f"u/{number}/{i}", "text": prose(10_000 * number + i), "score": 3.0 + i % 2}
        for i in range(documents)
    ]


def publish(hub: LoopbackHub, tmp_path: Path) -> None:
    """Publish all six, each as the real one is laid out; more files than a small run needs."""
    files = {f"sample/100BT/{i:03d}_00000.parquet": parquet(tmp_path, web(i)) for i in range(FINEWEB_FILES)}
    other = {"data/CC-MAIN-2024-10/train-00000.parquet": parquet(tmp_path, web(99, 3))}
    readme = card(default="data/*/*", **{"sample-100BT": "sample/100BT/*"})
    hub.dataset(FINEWEB).commit({"README.md": readme, **files, **other})
    pages = [{"id": str(i), "url": f"w/{i}", "title": f"T{i}", "text": prose(2_000_000 + i, 130)} for i in range(40)]
    readme = card(**{"20231101__en": "20231101.en/*", "20231101__de": "20231101.de/*"})
    wiki = {"20231101.en/train-00000-of-00001.parquet": parquet(tmp_path, pages)}
    hub.dataset(WIKIPEDIA).commit({"README.md": readme, **wiki})
    math = [{"url": f"m/{i}", "text": prose(3_000_000 + i, 90)} for i in range(40)]
    hub.dataset(MATH).commit({"README.md": b"# Math\n", "data/train-00000-of-00001.parquet": parquet(tmp_path, math)})
    hub.dataset(STACK).commit({"README.md": b"# Stack\n", **sites(tmp_path)})
    papers = [{"content": prose(5_000_000 + i, 260)} for i in range(40)]
    hub.dataset(PES2O).commit({"train-00000.parquet": parquet(tmp_path, papers)})
    books = [{"text": prose(6_000_000 + i), "prompt": "p"} for i in range(40)]
    stanford = {"data/stanford/train-00000-of-00001.parquet": parquet(tmp_path, books)}
    hub.dataset(TEXTBOOKS).commit({"README.md": card(stanford="data/stanford/*", stories="data/stories/*"), **stanford})


def sites(tmp_path: Path, per_site: int = 3) -> dict[str, bytes]:
    """StackExchange's files, one folder a site."""
    found: dict[str, bytes] = {}
    for place, site in enumerate(SITES):
        for number in range(per_site):
            first = 4_000_000 + 100_000 * place + 1000 * number
            rows = [
                question(first + i, f"<p>{prose(first + i)}</p>", [{"answer_id": i, "pm_score": 1, "selected": True,
                "text": f"<p>{prose(first + 500 + i)}</p>"}])
                for i in range(12)
            ]  # fmt: skip
            found[f"data/{site}/train-{number:05d}-of-{per_site:05d}.parquet"] = parquet(tmp_path, rows)
    return found


def environment(hub: LoopbackHub | None, tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a child whose Hub is the loopback one (None: nothing answers)."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RQWEN3_"))}
    profile = tmp_path / "hub.toml"
    if not profile.exists():
        profile.write_text(PROFILE)
    return {
        **clean,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:9",
        "RQWEN3_PROFILE": str(profile),
        "RQWEN3_HOME": str(tmp_path / "root"),
        "RQWEN3_HUB_PATIENCE_S": "20",
        "RQWEN3_WORKERS": "1",
        **more,
    }


def command(*words: str) -> list[str]:
    """`rqwen3 …`."""
    return [sys.executable, "-m", "rqwen3_pipeline.cli", *words]


def rqwen3(env: dict[str, str], *words: str, timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    """Run `rqwen3 …` to its end."""
    return subprocess.run(command(*words), env=env, capture_output=True, text=True, check=False, timeout=timeout_s)


def published(hub: LoopbackHub, dataset: str) -> dict[str, bytes]:
    repository = hub.dataset(dataset)
    return repository.commits[list(repository.commits)[-1]]


def raw(root: RunRoot) -> dict[str, bytes]:
    """Every file below raw/fineweb_edu but stamps, hidden ones included."""
    folder = root.path / "raw" / "fineweb_edu"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if not path.name.endswith(".stamp.json")}


def wanted(hub: LoopbackHub) -> dict[str, bytes]:
    files = published(hub, FINEWEB)
    return {path.replace("/", "__"): data for path, data in files.items() if path.startswith("sample/100BT/")}


def halves(tmp_path: Path) -> list[str]:
    """Partial files under whatever name, in the run root and in the cache's snapshots and blobs."""
    raw_ones = [p for p in (tmp_path / "root").rglob("*") if p.suffix == ".tmp"]
    cache = list((tmp_path / "hf").rglob("*.incomplete"))
    return [str(path) for path in raw_ones + cache]
