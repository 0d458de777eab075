import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.benchmarks import BENCHMARKS, GROUPS, MMLU_SUBJECTS, data_file, members, read_rows
from model.errors import ConfigError, SourceError

ARC = BENCHMARKS["arc_easy"]
ROW = {
    "id": "q1",
    "question": "What is wet?",
    "choices": {"text": ["stone", "water", "ash"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
ROWS = {
    "arc_easy": ROW,
    "hellaswag": {
        "activity_label": "Cooking",
        "ctx_a": "A cook takes a pan.",
        "ctx_b": "he",
        "endings": ["sings", "heats oil", "sleeps", "leaves"],
        "label": "1",
    },
    "piqa": {"goal": "open a jar", "sol1": "twist the lid", "sol2": "sing to it", "label": 0},
    "winogrande": {"sentence": "Ann thanked Eve as _ had helped.", "option1": "Ann", "option2": "Eve", "answer": "2"},
    "lambada_openai": {"text": "the cat saw the moon"},
    "sciq": {
        "support": "Ice melts.",
        "question": "What melts?",
        "distractor1": "rock",
        "distractor2": "air",
        "distractor3": "light",
        "correct_answer": "ice",
    },
    "mmlu_anatomy": {"question": "Where is the hyoid?", "choices": ["neck", "foot", "hand", "hip"], "answer": 0},
}


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_read_rows_of_each_benchmark_in_the_hubs_columns_are_read_from_both_formats(tmp_path: Path, name: str) -> None:
    task = BENCHMARKS[name]
    path = write(tmp_path / task.folder / f"{task.split}.jsonl", [ROWS[name]] * 2)
    assert data_file(tmp_path, task) == path
    assert read_rows(path, task) == [ROWS[name]] * 2
    path.unlink()
    pq.write_table(pa.Table.from_pylist([ROWS[name]]), path.with_suffix(".parquet"))
    assert data_file(tmp_path, task) == path.with_suffix(".parquet")
    assert read_rows(path.with_suffix(".parquet"), task) == [ROWS[name]]


def test_text_holds_the_question_with_its_right_answer() -> None:
    texts = {name: BENCHMARKS[name].text(row) for name, row in ROWS.items()}
    assert texts == {
        "arc_easy": "What is wet? water",
        "hellaswag": "A cook takes a pan. he heats oil",
        "piqa": "open a jar twist the lid",
        "winogrande": "Ann thanked Eve as Eve had helped.",
        "lambada_openai": "the cat saw the moon",
        "sciq": "What melts? ice",
        "mmlu_anatomy": "Where is the hyoid? neck",
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_easy", {"answerKey": "B"}, r"row 2: answerKey = 'B' is none of \['1', '2', '3'\]"),
        ("arc_easy", {"answerKey": None}, "row 2: lacks answerKey"),
        ("arc_easy", {"choices": ["a", "b"]}, "row 2: not of the kind that allenai/ai2_arc has"),
        ("hellaswag", {"label": ""}, "row 2: label = ''"),
        ("piqa", {"label": -1}, "row 2: label = -1"),
        ("winogrande", {"answer": ""}, "row 2: answer = ''"),
        ("lambada_openai", {"text": "one"}, "row 2: text has no last word"),
        ("sciq", {"correct_answer": ""}, "row 2: correct_answer is empty"),
        ("mmlu_anatomy", {"answer": 4}, "row 2: answer = 4"),
    ],
)
def test_read_rows_without_a_usable_label_refuses_the_file_and_names_the_row(
    tmp_path: Path, name: str, change: dict, message: str
) -> None:
    path = write(tmp_path / "test.jsonl", [ROWS[name], ROWS[name] | change])
    with pytest.raises(SourceError, match=message):
        read_rows(path, BENCHMARKS[name])


@pytest.mark.parametrize("missing", ["question", "choices", "answerKey"])
def test_read_rows_of_a_file_without_a_column_names_it_and_those_there_are(tmp_path: Path, missing: str) -> None:
    path = write(tmp_path / "test.jsonl", [{key: value for key, value in ROW.items() if key != missing}])
    with pytest.raises(SourceError, match=rf"row 1: lacks {missing}; it has .*id"):
        read_rows(path, ARC)


@pytest.mark.parametrize("content", [b"", b"\n", b"{", b"[1]\n", b"\xff\xfe"])
def test_read_rows_of_a_damaged_or_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("test.jsonl", "test.parquet"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError, match=name):
            read_rows(tmp_path / name, ARC)


def test_read_rows_of_a_parquet_file_with_bytes_that_are_no_utf8_names_it(tmp_path: Path) -> None:
    raw = pa.array([b"\xff"], pa.binary())
    text = pa.StringArray.from_buffers(1, *raw.buffers()[1:3])
    pq.write_table(pa.table({"text": text}), tmp_path / "test.parquet")
    with pytest.raises(SourceError, match=r"test\.parquet: .*utf-8"):
        read_rows(tmp_path / "test.parquet", BENCHMARKS["lambada_openai"])


def test_members_of_mmlu_are_its_subjects_and_an_unknown_name_lists_the_known() -> None:
    assert len(members("mmlu")) == len(MMLU_SUBJECTS) == 57
    assert [task.name for task in members("mmlu_anatomy")] == ["mmlu_anatomy"]
    assert "mmlu" in GROUPS
    with pytest.raises(ConfigError, match="arc_easy, arc_challenge"):
        members("arc")
