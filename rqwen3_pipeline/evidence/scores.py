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
        "versions": table_of(scores.get("versions")),
    }


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
