"""The model card of an export: what the Hub reads in its header, what a person reads below.

Scores stand in the header as the Hub's `model-index` and in a table, each with its standard error and
the chance level; a score that is none stands nowhere. When scores come in, the card of an export that
stands is written again, without torch. Costs nothing.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from model.config import RunConfig
from model.files import read_json, sha256_file, write_json, write_text

CARD, RECORD = "README.md", "export.json"
"""Of an export's files, the card, and what says how the export was made and what the others' hashes are."""
METRICS = {"acc": "accuracy", "acc_norm": "accuracy per character"}


def model_card(
    run: RunConfig, sidecar: dict[str, Any], tokenizer_ids: int, dtype: str, scores: dict[str, Any] | None = None
) -> str:
    """`README.md` of the export.

    Args:
        run: the configuration.
        sidecar: the checkpoint's.
        tokenizer_ids: ids of the tokenizer.
        dtype: of the weights, `fp32` or `bf16`.
        scores: the content of the `scores.json` of this very checkpoint, where there is one.
    """
    model, training, step = run.model, run.training, int(sidecar["step"])
    rows = [
        ("parameters", f"{model.parameters():,}"),
        (
            "layers, width, heads",
            f"{model.n_layer}, {model.d_model}, {model.num_heads} ({model.num_kv_heads} key/value)",
        ),
        ("context", f"{model.max_seq_len:,} tokens"),
        ("embedding rows; ids of the tokenizer", f"{model.vocab_size:,}; {tokenizer_ids:,}"),
        ("steps; tokens trained on", f"{step:,}; {step * training.tokens_per_step:,}"),
        ("weights", dtype),
        ("checkpoint", f"SHA-256 `{sidecar['sha256']}`"),
        ("data (SHA-256 of the manifest)", f"`{sidecar.get('data_fingerprint')}`"),
        ("code (commit)", f"`{sidecar.get('commit')}`"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    results = _results(scores or {})
    return f"""---
{_header(run.name, results)}---

# {run.name}

A language model of the Qwen3 architecture, pretrained from scratch. It completes text; it was not
tuned to follow instructions, and what it says may be wrong.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{run.name}")
tokenizer = AutoTokenizer.from_pretrained("{run.name}")
```

Rows of the embedding at or above the tokenizer's number of ids were never trained; do not sample them.
{_table(results, scores or {})}"""


def scores_of(path: Path | None, checkpoint_sha256: str) -> dict[str, Any] | None:
    """The scores in a file, if they are this checkpoint's."""
    scores = read_json(path) if path is not None and path.is_file() else {}
    return scores if scores.get("checkpoint", {}).get("sha256") == checkpoint_sha256 else None


def read_record(out: Path) -> dict[str, Any]:
    """What `export.json` of a folder holds; empty where there is none."""
    return read_json(out / RECORD) if (out / RECORD).is_file() else {}


def file_record(path: Path) -> dict[str, Any]:
    """Size and hash of one of an export's files, as its record holds them."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def write_card(out: Path, record: dict[str, Any], card: str) -> None:
    """Make `card` the card of an export, and its record say so; nothing is written where both do already."""
    path = out / CARD
    if path.read_text(encoding="utf-8") != card:
        write_text(path, card)
    if record["files"][CARD] != (now := file_record(path)):
        record["files"][CARD] = now
        write_json(out / RECORD, record)


def renew_card(out: Path, run: RunConfig, sidecar: dict[str, Any], scores: Path) -> bool:
    """Show scores in the card of an export that stands.

    Args:
        out: the export.
        run: the configuration.
        sidecar: the checkpoint's.
        scores: the `scores.json`.

    Returns:
        False where the folder is no export of this checkpoint; nothing is changed then.
    """
    record = read_record(out)
    if record.get("checkpoint_sha256") != sidecar["sha256"] or not (out / CARD).is_file():
        return False
    shown = scores_of(scores, sidecar["sha256"])
    write_card(out, record, model_card(run, sidecar, record["tokenizer_ids"], record["dtype"], shown))
    return True


def _results(scores: dict[str, Any]) -> list[dict[str, Any]]:
    """Every score that is a number, flat."""
    found: list[dict[str, Any]] = []
    for task, entry in sorted(scores.get("tasks", {}).items()):
        for metric, words in METRICS.items():
            if entry.get(metric) is not None:
                found.append({"task": task, "metric": metric, "words": words, "value": entry[metric]} | _about(entry))
                found[-1]["stderr"] = entry.get(f"{metric}_stderr")
    bits = scores.get("bits_per_byte", {}).get("all", {}).get("bits_per_byte")
    if bits is not None:
        found.append({"task": "held-out documents", "metric": "bits_per_byte", "words": "bits per byte", "value": bits})
    return found


def _about(entry: dict[str, Any]) -> dict[str, Any]:
    told = {"n": entry.get("n"), "chance": entry.get("chance"), "limited": entry.get("limited", False)}
    return told | {"data": entry.get("data", {})}


def _header(name: str, results: list[dict[str, Any]]) -> str:
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "language": ["en"]}
    if results:
        listed = [
            {
                "task": {"type": "text-generation", "name": "Text generation"},
                "dataset": {
                    "name": result["task"],
                    "type": result.get("data", {}).get("dataset") or result["task"],
                    **({"split": result["data"]["split"]} if result.get("data") else {}),
                },
                "metrics": [{"type": result["metric"], "name": result["words"], "value": round(result["value"], 6)}],
            }
            for result in results
        ]
        header["model-index"] = [{"name": name, "results": listed}]
    return yaml.safe_dump(json.loads(json.dumps(header)), sort_keys=False, allow_unicode=True)


def _table(results: list[dict[str, Any]], scores: dict[str, Any]) -> str:
    if not results:
        return ""
    lines = [
        "",
        "## Evaluation",
        "",
        "| task | metric | score | standard error | chance | items |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        figures = [result["value"], result.get("stderr"), result.get("chance")]
        told = ["" if figure is None else f"{figure:.4f}" for figure in figures]
        items = "" if result.get("n") is None else f"{result['n']:,}{' (not all)' if result['limited'] else ''}"
        lines.append(f"| {result['task']} | {result['words']} | {' | '.join(told)} | {items} |")
    protocol = scores.get("benchmarks", {}).get("protocol", {})
    engine = f"{scores.get('engine')} {scores.get('engine_version')}"
    shots = f", {protocol['shots']} shots, start token: {protocol['start_token']}" if protocol else ""
    return "\n".join([*lines, "", f"Engine: {engine}{shots}; {scores.get('precision')}.", ""])
