"""Where everything stands, read from the run root's files: for a program, and for a person.

Nothing is asked of Dagster or of SLURM, so it works while either is down; what they add is the part of
`services`. Pieces are judged by their stamps, as the stages themselves judge them; no shard and no
checkpoint is read. Costs a small read per piece: a second for some thousand of them.
"""

import shutil
from pathlib import Path
from typing import Any

from model.config import RunConfig
from model.errors import RQwen3Error
from model.files import read_json, read_jsonl, sha256_file
from rqwen3_pipeline.commands import commands
from rqwen3_pipeline.corpus.build import items_of, pending
from rqwen3_pipeline.corpus.lock import Lock, read_lock
from rqwen3_pipeline.corpus.sources import STAGES, CorpusConfig, corpus_config
from rqwen3_pipeline.corpus.stamps import read_stamp, tokens_stamp_path
from rqwen3_pipeline.evidence.curves import effective
from rqwen3_pipeline.evidence.readings import jsonable
from rqwen3_pipeline.evidence.training import lost_at_most
from rqwen3_pipeline.experiment_files import (
    checkpoints,
    final_checkpoint,
    lock_holder,
    other_manifest,
    saved_step,
    went_on_from,
)
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.status_text import render

__all__ = ["render", "status"]

PIECE_STAGES = STAGES[:-1]
COUNTS = ("documents", "tokens", "text_bytes", "heldout_documents", "heldout_tokens")


def status(root: RunRoot, run: RunConfig, config_path: Path) -> dict[str, Any]:
    """The state of a run root.

    Args:
        root: the run root.
        run: the configuration.
        config_path: the file it came from, which the next command names.

    Returns:
        Plain JSON values: `home`; `lock` {present, files, problem}; `stages` {stage: {source: {done,
        wanted, missing: [keys]}}} (for `survivors` by group); `sources` {source: counts of its finished
        token partitions}; `manifest` {present, sha256, tokens_used, …}; `experiments` {name: …};
        `exports`, `evaluations`, `evidence` {name: path below the root}; `disk_free_bytes`; and
        `next` {command, why}, where runs are processes of this host; see `cluster_next` for the other case.
    """
    config = corpus_config(run)
    lock, problem = _lock(root)
    stages = {stage: _stage(stage, root, config, lock) for stage in PIECE_STAGES} if lock else {}
    names = sorted({run.name, *(path.name for path in root.path.glob("experiments/*") if path.is_dir())})
    manifest = _manifest(root)
    found: dict[str, Any] = {
        "home": str(root.path),
        "experiment": run.name,
        "lock": {
            "present": root.lock.is_file(),
            "files": sum(len(lock.files(source)) for source in lock.sources) if lock else 0,
            "problem": problem,
        },
        "stages": stages,
        "sources": {source: _tokens(root, lock, source) for source in config.sources} if lock else {},
        "manifest": manifest,
        "experiments": {name: _experiment(root, name, run, manifest.get("sha256")) for name in names},
        "exports": _present(root, "exports", "config.json"),
        "evaluations": _present(root, "evaluations", "scores.json"),
        "evidence": _present(root, "evidence", "index.html"),
        "disk_free_bytes": _free_bytes(root.path),
    }
    found["next"] = _next(found, run, commands(run, root.path, config_path).run)
    return jsonable(found)


def _lock(root: RunRoot) -> tuple[Lock | None, str | None]:
    if not root.lock.is_file():
        return None, None
    try:
        return read_lock(root), None
    except RQwen3Error as error:
        return None, str(error)


def _stage(stage: str, root: RunRoot, config: CorpusConfig, lock: Lock) -> dict[str, dict[str, Any]]:
    """Pieces of a stage that are current, by source; for `survivors` by group."""
    rows: dict[str, dict[str, Any]] = {}
    for name in config.groups() if stage == "survivors" else config.sources:
        try:
            wanted = len(items_of(stage, config, lock, name))
            missing = pending(stage, root, config, lock, name)
        except RQwen3Error as error:
            rows[name] = {"done": 0, "wanted": 0, "missing": [], "problem": str(error)}
            continue
        rows[name] = {"done": wanted - len(missing), "wanted": wanted, "missing": missing}
    return rows


def _tokens(root: RunRoot, lock: Lock, source: str) -> dict[str, int]:
    """Sums over the stamps of a source's token partitions; those not made yet count nothing."""
    sums: dict[str, int] = dict.fromkeys(COUNTS, 0)
    for file in lock.sources.get(source, ()):
        try:
            stamp = read_stamp(tokens_stamp_path(root, source, file.key))
        except RQwen3Error:
            continue
        if stamp is not None:
            for name in COUNTS:
                sums[name] += int(stamp.report.get(name) or 0)
    return sums


def _manifest(root: RunRoot) -> dict[str, Any]:
    if not root.manifest.is_file():
        return {"present": False}
    try:
        data = read_json(root.manifest)
        sources = data["sources"].values()
        return {
            "present": True,
            "sha256": sha256_file(root.manifest),
            "shards": len(data["shards"]),
            "heldout_shards": len(data["heldout"]),
            **{name: sum(item[name] for item in sources) for name in ("documents", "tokens", "tokens_used")},
            "missing_tokens": sum(item["missing_tokens"] for item in sources),
        }
    except (RQwen3Error, KeyError, TypeError, AttributeError) as error:
        return {"present": True, "problem": f"{type(error).__name__}: {error}"}


def _experiment(root: RunRoot, name: str, run: RunConfig, manifest_sha256: str | None) -> dict[str, Any]:
    folder = root.path / "experiments" / name
    ledger = read_jsonl(folder / "ledger.jsonl")
    points = effective(read_jsonl(folder / "metrics.jsonl"), "train", went_on_from(folder, ledger)).points
    last = points[-1] if points else {}
    final = final_checkpoint(folder)
    keys = ("submission", "attempt", "from_step", "to_step", "saved_step", "stop_reason", "exit_code", "lost_steps")
    return {
        "present": folder.is_dir(),
        "steps_saved": saved_step(folder) or 0,
        "steps_logged": last.get("step", 0),
        "max_steps": run.training.max_steps if name == run.name else None,
        "loss": last.get("loss"),
        "tokens_per_s": last.get("tokens_per_s"),
        "submissions": [
            {**{key: record.get(key) for key in keys}, "lost_steps_at_most": lost_at_most(record)} for record in ledger
        ],
        "checkpoints": [
            {"file": c.path.name, "step": c.step, "bytes": c.size_bytes, "whole": c.whole} for c in checkpoints(folder)
        ],
        "finished": final is not None and final.whole,
        "lock": lock_holder(folder),
        "other_manifest": other_manifest(folder, manifest_sha256),
    }


def _present(root: RunRoot, folder: str, file: str) -> dict[str, str]:
    """Experiments that have a file, with its path below the run root."""
    paths = sorted(root.path.glob(f"{folder}/*/{file}"))
    return {path.parent.name: path.relative_to(root.path).as_posix() for path in paths}


def _free_bytes(path: Path) -> int:
    existing = path
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _next(found: dict[str, Any], run: RunConfig, command: str) -> dict[str, str | None]:
    """The next command to type, and why; no command when all is done or somebody is at it."""
    experiment = found["experiments"][run.name]
    holder = experiment["lock"]
    missing = sum(len(row["missing"]) for rows in found["stages"].values() for row in rows.values())
    problems = [row["problem"] for rows in found["stages"].values() for row in rows.values() if "problem" in row]
    if found["lock"]["problem"]:
        return {"command": command, "why": found["lock"]["problem"]}
    if not found["lock"]["present"]:
        return {"command": command, "why": "nothing is locked yet: it pins the source files and does every stage"}
    if problems:
        return {"command": command, "why": problems[0]}
    if missing:
        return {"command": command, "why": f"{missing:,} pieces of the corpus are not made yet"}
    if not found["manifest"]["present"] or "problem" in found["manifest"]:
        return {"command": command, "why": "the corpus lacks its manifest"}
    if holder is not None and holder["alive"]:
        return {"command": None, "why": f"submission {holder.get('submission')} is training (process {holder['pid']})"}
    if experiment["other_manifest"]:
        return {"command": None, "why": experiment["other_manifest"]}
    if not experiment["finished"]:
        held = ""
        if holder is not None and holder["alive"] is None:
            held = f" The lock names {holder.get('host')}; look there first whether it still trains."
        why = f"the training stands at step {experiment['steps_saved']:,} of {run.training.max_steps:,}."
        return {"command": command, "why": why + held}
    for what, key in (("the export", "exports"), ("the evaluation", "evaluations"), ("the report", "evidence")):
        if run.name not in found[key]:
            return {"command": command, "why": f"{what} is not made yet"}
    return {"command": None, "why": f"all is done; read {Path(found['home']) / found['evidence'][run.name]}"}
