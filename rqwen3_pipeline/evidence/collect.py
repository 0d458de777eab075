"""Everything the evidence report says, as one JSON-serialisable value.

Costs reading the logs and small files of one run, a hash of the final checkpoint and of the export
(about 1 GB a second), and a stat of every shard.
"""

from dataclasses import asdict
from typing import Any

from model.config import RunConfig
from rqwen3_pipeline.commands import commands
from rqwen3_pipeline.evidence.checks import check, corpus_checks, receipt_checks, training_checks
from rqwen3_pipeline.evidence.funnel import corpus_evidence
from rqwen3_pipeline.evidence.known_runs import CAVEAT, KNOWN_RUN, MODELS, SCORES
from rqwen3_pipeline.evidence.readings import Reader, jsonable
from rqwen3_pipeline.evidence.receipts import receipts_evidence
from rqwen3_pipeline.evidence.scores import evaluation_evidence
from rqwen3_pipeline.evidence.training import Logs, read_logs, steps_kept, training_evidence
from rqwen3_pipeline.evidence.windows import windows_read
from rqwen3_pipeline.evidence.words import between, magnitude
from rqwen3_pipeline.experiment_files import final_checkpoint
from rqwen3_pipeline.settings import RunRoot

FORMAT_VERSION = 1


def collect(root: RunRoot, run: RunConfig, logs: Logs | None = None) -> dict[str, Any]:
    """Collect the evidence of one run, finished or not.

    Args:
        root: the run root.
        run: the configuration of the experiment.
        logs: the experiment's logs where they were read already.

    Returns:
        Plain JSON values, none of them a non-finite number. A figure is `{"value", "from": [files]}`;
        one that no file backs has the value None, and `missing` names the command that makes it. No
        date, host or absolute path is added, so the same files give the same evidence.
    """
    reader = Reader(root=root.path)
    logs = logs if logs is not None else read_logs(reader, root.experiment(run.name))
    manifest = reader.table(root.manifest)
    corpus = corpus_evidence(reader, root, run, manifest)
    training = training_evidence(reader, run, logs)
    evaluation = evaluation_evidence(reader, root, run.name)
    receipts = receipts_evidence(reader, root, run.name, manifest)
    windows = windows_read(manifest, run.training, steps_kept(logs)) if manifest else None
    checks = [
        *corpus_checks(corpus),
        *training_checks(reader, run, logs, training),
        *receipt_checks(receipts, manifest, final_checkpoint(logs.folder), evaluation),
    ]
    missing = _missing(root, run, logs, corpus, evaluation)
    seen = "; ".join(f"{problem['file']}: {problem['problem']}" for problem in reader.problems)
    checks.append(check("readable", "Every file that is there can be read.", not reader.problems, seen or "All could."))
    return jsonable(
        {
            "format_version": FORMAT_VERSION,
            "experiment": run.name,
            "headline": headline(run, training),
            "verdict": verdict(checks),
            "checks": checks,
            "notes": _notes(corpus, windows, training),
            "missing": missing,
            "problems": reader.problems,
            "training": training,
            "windows": windows,
            "corpus": corpus,
            "evaluation": evaluation,
            "comparison": {"caveat": CAVEAT, "models": MODELS, "known_run": KNOWN_RUN, "scores": SCORES},
            "receipts": receipts,
            "config": {"model": asdict(run.model), "training": asdict(run.training)},
        }
    )


def headline(run: RunConfig, training: dict[str, Any]) -> str:
    """What was made, in one or two plain sentences."""
    model = f"a language model of {magnitude(run.model.parameters())} parameters"
    kept, wanted = training["steps_kept"]["value"], training["steps_wanted"]["value"]
    if kept == 0:
        return f"{run.name} will be {model}. No step of its training has been saved yet."
    count = training["submissions"]["value"]
    pieces = f", in {count} submission{'s' if count != 1 else ''}" if count else ""
    tokens = magnitude(training["tokens_kept"]["value"])
    if kept >= wanted:
        return f"{run.name} is {model}, trained from scratch on {tokens} tokens in {kept:,} steps{pieces}."
    return f"{run.name} is {model} in the making: {kept:,} of {wanted:,} steps, {tokens} tokens so far{pieces}."


def verdict(checks: list[dict[str, Any]]) -> str:
    """Whether every check holds, in words."""
    failed = [item for item in checks if item["holds"] is False]
    pending = [item for item in checks if item["holds"] is None]
    if not failed and not pending:
        return f"All {len(checks)} checks hold."
    parts = [f"{len(checks) - len(failed) - len(pending)} of {len(checks)} checks hold"]
    if failed:
        parts.append(f"{len(failed)} {'does' if len(failed) == 1 else 'do'} not")
    if pending:
        parts.append(f"{len(pending)} {'is' if len(pending) == 1 else 'are'} pending")
    return f"{', '.join(parts)}."


def _notes(corpus: dict[str, Any], windows: dict[str, Any] | None, training: dict[str, Any]) -> list[str]:
    """What is no fault, but should be known."""
    notes: list[str] = []
    for row in corpus["sources"]:
        budget, used = row["budget_tokens"], row["tokens_used"]
        if budget is not None and used is not None and used < budget:
            notes.append(
                f"{row['source']} fell short of its budget: {used:,} of {budget:,} tokens, {budget - used:,} missing."
            )
    if windows is not None:
        whole = windows["whole_run"]
        if whole["repeated_reads"]:
            notes.append(
                f"The whole run reads {whole['reads']:,} windows, but the corpus has {windows['windows']:,}: "
                f"{whole['repeated_reads']:,} reads are repeats ({whole['epochs']:.2f} epochs)."
            )
    lost, most = training["lost_steps"]["value"], training["lost_steps_at_most"]["value"]
    if lost or most:
        steps = between(lost, most)
        notes.append(f"{steps[0].upper()}{steps[1:]} steps were lost to kills, and done again where the run went on.")
    if training["curve"]["abandoned_lines"]:
        notes.append(
            f"{training['curve']['abandoned_lines']:,} logged steps came after the last save of a killed attempt and "
            "have not been reached again; they are left out of the curve."
        )
    return notes


def _missing(
    root: RunRoot, run: RunConfig, logs: Logs, corpus: dict[str, Any], evaluation: dict[str, Any] | None
) -> list[dict[str, str]]:
    """What is not there yet, each with the command that makes it, in the order in which it is made."""
    sampled = {sample["step"] for sample in logs.samples}
    export, type_next = root.export(run.name), commands(run)
    wanted: list[tuple[bool, str, str]] = [
        (not root.lock.is_file(), "the lock of the sources", type_next.corpus_build),
        (corpus["manifest_file"] is None, "the corpus and its manifest", type_next.corpus_build),
        (not logs.train.points, "the training's metrics", type_next.run),
        (not logs.ledger, "the ledger of submissions", type_next.run),
        (not logs.heldout.points, "the held-out loss", type_next.run),
        (0 not in sampled, "the sample before training", type_next.run),
        (run.training.max_steps not in sampled, "the sample after the last step", type_next.run),
        (steps_kept(logs) < run.training.max_steps, "the remaining steps of the training", type_next.run),
        (not (logs.folder / "checkpoints" / "final.pt").is_file(), "the final checkpoint", type_next.run),
        (not export.is_dir() or not any(export.iterdir()), "the export for Hugging Face", type_next.run),
        (evaluation is None, "the evaluation's scores", type_next.run),
    ]
    found = [{"what": what, "command": command} for absent, what, command in wanted if absent]
    if corpus["manifest_file"] is not None:
        empty = [row["source"] for row in corpus["sources"] if not row["tokens_used"]]
        found += [{"what": f"tokens of {name}", "command": type_next.corpus_build} for name in empty]
    return found
