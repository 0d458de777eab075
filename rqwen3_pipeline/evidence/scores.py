"""Evaluation scores with their judgement in words, and the published ones beside them.

A score says something only when it lies above chance by more than three standard errors; by chance
alone that happens about once in 740 times. The same rule judges our scores and the published ones.
"""

from typing import Any

from rqwen3_pipeline.evidence.readings import Reader, figure, finite, table_of, whole
from rqwen3_pipeline.settings import RunRoot

SIGMAS = 3.0


def judge(score: float | None, stderr: float | None, chance: float | None) -> dict[str, Any]:
    """Compare a score with chance.

    Returns:
        `sigmas`, (score − chance) / stderr or None; `verdict`, one of `above chance`,
        `not told apart from chance`, `below chance`, `can't be judged`; and `words`, the same as a
        sentence.
    """
    if score is None or stderr is None or chance is None or stderr <= 0:
        lacking = "score" if score is None else "chance level" if chance is None else "standard error"
        return {"sigmas": None, "verdict": "can't be judged", "words": f"Can't be judged: it has no {lacking}."}
    sigmas = (score - chance) / stderr
    distance = f"{abs(sigmas):.1f} standard errors {'above' if sigmas >= 0 else 'below'} chance"
    if sigmas > SIGMAS:
        verdict, words = "above chance", f"Above chance: {distance}."
    elif sigmas < -SIGMAS:
        verdict, words = "below chance", f"Below chance: {distance}, so the answer keys deserve a look."
    else:
        verdict, words = "not told apart from chance", f"Not told apart from chance: {distance}."
    return {"sigmas": sigmas, "verdict": verdict, "words": words}


def evaluation_evidence(reader: Reader, root: RunRoot, name: str) -> dict[str, Any] | None:
    """The scores of one experiment, judged; None while there are none."""
    path = root.evaluation(name) / "scores.json"
    scores = reader.table(path)
    if scores is None:
        return None
    file = reader.name(path)
    rows: list[dict[str, Any]] = []
    for task, result in sorted(table_of(scores.get("tasks")).items()):
        rows += _rows(task, table_of(result), file)
    return {
        "file": file,
        "engine": scores.get("engine"),
        "engine_version": scores.get("engine_version"),
        "checkpoint": table_of(scores.get("checkpoint")),
        "scores": rows,
        "bits_per_byte": {
            source: figure(finite(entry.get("bits_per_byte") if isinstance(entry, dict) else entry), file)
            for source, entry in table_of(scores.get("bits_per_byte")).items()
        },
        "bits_per_byte_sliding": _sliding(table_of(scores.get("bits_per_byte_sliding")), file),
        "protocol": table_of(table_of(scores.get("benchmarks")).get("protocol")),
        "control": _control(reader, root, name),
        "expectations": _expectations(reader, root, name, rows),
        "versions": table_of(scores.get("versions")),
    }


def _sliding(scores: dict[str, Any], file: str) -> dict[str, Any]:
    """Bits per byte with overlapping windows, and what those were."""
    return {
        "context_tokens": whole(scores.get("context_tokens")),
        "stride_tokens": whole(scores.get("stride_tokens")),
        "sources": {
            source: figure(finite(table_of(entry).get("bits_per_byte")), file)
            for source, entry in table_of(scores.get("sources")).items()
        },
    }


def _control(reader: Reader, root: RunRoot, name: str) -> dict[str, Any] | None:
    """Scores of the model that is known to be above chance, on the same questions; None where none was asked."""
    path = root.evaluation(name) / "control" / "benchmarks.json"
    asked = reader.table(path)
    if asked is None:
        return None
    file = reader.name(path)
    rows = [row for task, result in sorted(table_of(asked.get("tasks")).items()) for row in _rows(task, result, file)]
    above = sorted({row["task"] for row in rows if row["verdict"] == "above chance"})
    words = (
        f"The control is above chance on {', '.join(above)}: there the questions can tell a model that knows from one "
        "that guesses."
        if above
        else "The control is above chance nowhere, so a score near chance here says nothing of the model."
    )
    return {"model": table_of(asked.get("protocol")).get("model"), "scores": rows, "words": words, "file": file}


def _expectations(reader: Reader, root: RunRoot, name: str, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What was written down before the scores came in, each judged by its score; None where nothing was.

    A score without a standard error is compared as it is; else an expectation is missed only by more than
    one standard error, since a score is no exact number.
    """
    path = root.evaluation(name) / "expectations.json"
    kept = reader.table(path)
    if kept is None:
        return None
    judged: list[dict[str, Any]] = []
    for task, expected in sorted(table_of(kept.get("tasks")).items()):
        low, high = finite(expected.get("low")), finite(expected.get("high"))
        matching = [row for row in rows if (row["task"], row["metric"]) == (task, expected.get("metric"))]
        score, stderr = (matching[0]["score"], matching[0]["stderr"] or 0.0) if matching else (None, 0.0)
        if score is None or low is None or high is None:
            holds, words = None, "There is no score to judge it by."
        else:
            holds = low - stderr <= score <= high + stderr
            where = "above" if score > high else "below" if score < low else "within"
            words = f"{'As expected' if holds else 'Not as expected'}: {100 * score:.1f} % lies {where} what was said."
        judged.append({"task": task, **expected, "score": score, "holds": holds, "words": words})
    facts = {"written_at": kept.get("written_at"), "sha256": kept.get("sha256"), "file": reader.name(path)}
    return facts | {"judged": judged}


def _rows(task: str, result: dict[str, Any], file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for metric in ("acc", "acc_norm"):
        if metric not in result:
            continue
        score, stderr, chance = (finite(result.get(key)) for key in (metric, f"{metric}_stderr", "chance"))
        rows.append(
            {
                "task": task,
                "metric": metric,
                "score": score,
                "stderr": stderr,
                "chance": chance,
                "n": whole(result.get("n")),
                "reason": result.get("reason") or result.get(f"{metric}_reason"),
                "from": [file],
                **judge(score, stderr, chance),
            }
        )
    return rows
