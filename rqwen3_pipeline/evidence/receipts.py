"""Receipts: name, size and SHA-256 of everything that another person would need to hold the same in hand.

Hashes of the small files, of the final checkpoint and of the export are computed here, from the bytes
as they lie there (about 1 GB a second). The shards' are those that the manifest lists, which the
tokenization computed as it wrote them; their sizes are checked, and `sha256sum` checks the rest.
"""

import functools
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from model.files import sha256_file
from rqwen3_pipeline.evidence.readings import Reader, whole
from rqwen3_pipeline.experiment_files import final_checkpoint
from rqwen3_pipeline.settings import RunRoot

MAIN_PACKAGES = ("torch", "transformers", "tokenizers", "fastokens", "pyarrow", "numpy", "dagster", "lm_eval")
"""Packages whose version the page itself shows; evidence.json lists all."""


def receipts_evidence(reader: Reader, root: RunRoot, name: str, manifest: dict[str, Any] | None) -> dict[str, Any]:
    """All receipts.

    Returns:
        `files` [{what, file, bytes, sha256, stated_sha256, agrees}], `shards` [{file, bytes, sha256,
        size_agrees, heldout}], `packages` {name: version}, `python`.
    """
    folder = root.experiment(name)
    wanted: list[tuple[str, Path, str | None]] = [
        ("lock of the sources", root.lock, None),
        ("tokenizer", root.tokenizer, _stated_tokenizer(manifest)),
        ("manifest", root.manifest, None),
        ("config of the run", folder / "config.toml", None),
        ("metrics", folder / "metrics.jsonl", None),
        ("ledger", folder / "ledger.jsonl", None),
    ]
    final = final_checkpoint(folder)
    if final is not None:
        wanted.append(("final checkpoint", final.path, final.stated_sha256))
        wanted.append(("its sidecar", final.path.with_suffix(".json"), None))
    export = root.export(name)
    for path in sorted(export.rglob("*")) if export.is_dir() else []:
        if path.is_file() and not path.name.startswith("."):
            wanted.append(("export", path, None))
    wanted.append(("scores", root.evaluation(name) / "scores.json", None))
    return {
        "files": [_receipt(reader, *entry) for entry in wanted if entry[1].is_file()],
        "shards": _shards(root, manifest),
        "packages": packages(),
        "python": platform.python_version(),
    }


def _stated_tokenizer(manifest: dict[str, Any] | None) -> str | None:
    tokenizer = (manifest or {}).get("tokenizer")
    stated = tokenizer.get("sha256") if isinstance(tokenizer, dict) else None
    return stated if isinstance(stated, str) else None


def _receipt(reader: Reader, what: str, path: Path, stated: str | None) -> dict[str, Any]:
    sha256 = sha256_file(path)
    return {
        "what": what,
        "file": reader.name(path),
        "bytes": path.stat().st_size,
        "sha256": sha256,
        "stated_sha256": stated,
        "agrees": None if stated is None else stated == sha256,
    }


def _shards(root: RunRoot, manifest: dict[str, Any] | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key in ("shards", "heldout"):
        for shard in (manifest or {}).get(key, []):
            path, tokens = root.path / str(shard.get("path")), whole(shard.get("tokens")) or 0
            size_bytes = path.stat().st_size if path.is_file() else None
            rows.append(
                {
                    "file": shard.get("path"),
                    "bytes": size_bytes,
                    "sha256": shard.get("sha256"),
                    "size_agrees": size_bytes == 4 * tokens,
                    "heldout": key == "heldout",
                }
            )
    return rows


@functools.cache
def packages() -> dict[str, str]:
    """Every installed distribution with its version, by name; read once per process."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))
