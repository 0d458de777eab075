"""The benchmarks: where their rows lie, which columns they have, and what of them must not be trained on.

Rows are read in the Hub's columns, from `<data>/<folder>/<split>.jsonl` or `.parquet`. A file that
lacks a column, or has a row without a usable label, is refused whole and by name: a score over the
rows that happen to be fine would be another benchmark's. Torch-free; costs one reading of the file.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model.errors import ConfigError, SourceError

Row = dict[str, Any]

# fmt: off
MMLU_SUBJECTS = (
    "abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge", "college_biology",
    "college_chemistry", "college_computer_science", "college_mathematics", "college_medicine", "college_physics",
    "computer_security", "conceptual_physics", "econometrics", "electrical_engineering", "elementary_mathematics",
    "formal_logic", "global_facts", "high_school_biology", "high_school_chemistry", "high_school_computer_science",
    "high_school_european_history", "high_school_geography", "high_school_government_and_politics",
    "high_school_macroeconomics", "high_school_mathematics", "high_school_microeconomics", "high_school_physics",
    "high_school_psychology", "high_school_statistics", "high_school_us_history", "high_school_world_history",
    "human_aging", "human_sexuality", "international_law", "jurisprudence", "logical_fallacies", "machine_learning",
    "management", "marketing", "medical_genetics", "miscellaneous", "moral_disputes", "moral_scenarios", "nutrition",
    "philosophy", "prehistory", "professional_accounting", "professional_law", "professional_medicine",
    "professional_psychology", "public_relations", "security_studies", "sociology", "us_foreign_policy", "virology",
    "world_religions",
)
# fmt: on
FORMATS = ("jsonl", "parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One task of the harness and its data."""

    name: str
    """The harness' name of the task."""
    group: str
    """The name that its score goes into; the task's own unless it is one of MMLU's subjects."""
    folder: str
    """Where its files lie below the data folder."""
    dataset: str
    """On the Hub."""
    config: str | None
    """The data set's configuration there."""
    split: str
    """The one that is scored."""
    columns: tuple[str, ...]
    """Without these a file is refused."""
    choices: Callable[[Row], int]
    """How many answers a row offers; 0 where a word is to be found."""
    label_problem: Callable[[Row], str]
    """What is wrong with a row's label, in words, or nothing."""
    text: Callable[[Row], str]
    """The words of a row that a corpus must not hold: the question with its right answer."""


def _one_of(column: str, valid: Callable[[Row], Iterable[Any]]) -> Callable[[Row], str]:
    def problem(row: Row) -> str:
        allowed = list(valid(row))
        return "" if row[column] in allowed else f"{column} = {row[column]!r} is none of {allowed}"

    return problem


def _arc(name: str, config: str) -> Benchmark:
    return Benchmark(
        name=name,
        group=name,
        folder=f"ai2_arc/{config}",
        dataset="allenai/ai2_arc",
        config=config,
        split="test",
        columns=("question", "choices", "answerKey"),
        choices=lambda row: len(row["choices"]["text"]),
        label_problem=_one_of("answerKey", lambda row: row["choices"]["label"]),
        text=lambda row: f"{row['question']} {row['choices']['text'][row['choices']['label'].index(row['answerKey'])]}",
    )


def _mmlu(subject: str) -> Benchmark:
    return Benchmark(
        name=f"mmlu_{subject}",
        group="mmlu",
        folder=f"mmlu/{subject}",
        dataset="cais/mmlu",
        config=subject,
        split="test",
        columns=("question", "choices", "answer"),
        choices=lambda row: len(row["choices"]),
        label_problem=_one_of("answer", lambda row: range(len(row["choices"]))),
        text=lambda row: f"{row['question']} {row['choices'][row['answer']]}",
    )


BENCHMARKS: dict[str, Benchmark] = {
    task.name: task
    for task in (
        _arc("arc_easy", "ARC-Easy"),
        _arc("arc_challenge", "ARC-Challenge"),
        Benchmark(
            name="hellaswag",
            group="hellaswag",
            folder="hellaswag",
            dataset="Rowan/hellaswag",
            config=None,
            split="validation",
            columns=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
            choices=lambda row: len(row["endings"]),
            label_problem=_one_of("label", lambda row: [str(i) for i in range(len(row["endings"]))]),
            text=lambda row: f"{row['ctx_a']} {row['ctx_b']} {row['endings'][int(row['label'])]}",
        ),
        Benchmark(
            name="piqa",
            group="piqa",
            folder="piqa",
            dataset="baber/piqa",
            config=None,
            split="validation",
            columns=("goal", "sol1", "sol2", "label"),
            choices=lambda row: 2,
            label_problem=_one_of("label", lambda row: (0, 1)),
            text=lambda row: f"{row['goal']} {row['sol2' if row['label'] else 'sol1']}",
        ),
        Benchmark(
            name="winogrande",
            group="winogrande",
            folder="winogrande",
            dataset="allenai/winogrande",
            config="winogrande_xl",
            split="validation",
            columns=("sentence", "option1", "option2", "answer"),
            choices=lambda row: 2,
            label_problem=_one_of("answer", lambda row: ("1", "2")),
            text=lambda row: row["sentence"].replace("_", row[f"option{row['answer']}"]),
        ),
        Benchmark(
            name="lambada_openai",
            group="lambada_openai",
            folder="lambada_openai",
            dataset="EleutherAI/lambada_openai",
            config="default",
            split="test",
            columns=("text",),
            choices=lambda row: 0,
            label_problem=lambda row: "" if len(row["text"].split()) > 1 else "text has no last word to be found",
            text=lambda row: row["text"],
        ),
        Benchmark(
            name="sciq",
            group="sciq",
            folder="sciq",
            dataset="allenai/sciq",
            config=None,
            split="test",
            columns=("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"),
            choices=lambda row: 4,
            label_problem=lambda row: "" if row["correct_answer"] else "correct_answer is empty",
            text=lambda row: f"{row['question']} {row['correct_answer']}",
        ),
        *(_mmlu(subject) for subject in MMLU_SUBJECTS),
    )
}
"""By the harness' name of the task, MMLU subject by subject."""

GROUPS = tuple(dict.fromkeys(task.group for task in BENCHMARKS.values()))
"""The names that may be asked for."""


def members(group: str) -> list[Benchmark]:
    """The tasks whose scores make a group's.

    Raises:
        ConfigError: there is no such benchmark; the message lists those there are.
    """
    found = [task for task in BENCHMARKS.values() if group in (task.group, task.name)]
    if not found:
        raise ConfigError(f"{group!r} is no benchmark. Valid: {', '.join(GROUPS)}.")
    return found


def data_file(data: Path, task: Benchmark) -> Path | None:
    """The file of a task's split, or None if the folder has none."""
    paths = [data / task.folder / f"{task.split}.{kind}" for kind in FORMATS]
    return next((path for path in paths if path.is_file()), None)


def read_rows(path: Path, task: Benchmark, kind: str | None = None) -> list[Row]:
    """Every row of a task's file, its columns and labels checked.

    Args:
        path: the file.
        task: whose rows it holds.
        kind: the suffix of its format, where its name has another.

    Raises:
        SourceError: the file is damaged or empty, a column is missing, or a row's label is not usable;
            the message names the file and the row.
    """
    rows = _parquet_rows(path) if (kind or path.suffix) == ".parquet" else _json_rows(path)
    if not rows:
        raise SourceError(f"{path}: holds no row. Fetch it again: rqwen3 eval --prefetch")
    for number, row in enumerate(rows, 1):
        missing = [name for name in task.columns if row.get(name) is None]
        if missing:
            raise SourceError(
                f"{path}, row {number}: lacks {', '.join(missing)}; it has {', '.join(row)}. Replace the file by one "
                f"in the columns of {task.dataset}: rqwen3 eval --prefetch"
            )
        try:
            problem = task.label_problem(row)
        except (TypeError, KeyError, AttributeError) as error:
            problem = f"not of the kind that {task.dataset} has ({error!r})"
        if problem:
            raise SourceError(f"{path}, row {number}: {problem}. A split without labels can't be scored; replace it.")
    return rows


def _json_rows(path: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SourceError(f"{path}: can't be read ({error}). Fetch it again: rqwen3 eval --prefetch") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SourceError(f"{path}, line {number}: no JSON ({error}). Fetch it: rqwen3 eval --prefetch") from error
        if not isinstance(row, dict):
            raise SourceError(f"{path}, line {number}: holds no object. Fetch it: rqwen3 eval --prefetch")
        rows.append(row)
    return rows


def _parquet_rows(path: Path) -> list[Row]:
    try:
        return pq.read_table(path).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SourceError(f"{path}: not a whole parquet file ({error}). Fetch it: rqwen3 eval --prefetch") from error
