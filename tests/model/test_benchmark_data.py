import json
import multiprocessing
import os
import signal
from pathlib import Path

import datasets
import pytest
from test_benchmarks import ROWS

from model import benchmark_data
from model.benchmarks import BENCHMARKS, data_file, read_rows
from model.files import sha256_file


@pytest.fixture
def hub(monkeypatch):
    """What the Hub has, by data set; anything else is a connection that fails. Notes what was asked for."""
    has: dict[str, list[dict]] = {}
    asked: list[tuple] = []

    def load(path, name, split):
        asked.append((path, name, split))
        if path not in has:
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
        return datasets.Dataset.from_list(has[path])

    monkeypatch.setattr(datasets, "load_dataset", load)
    return has, asked


def fetch(data: Path, *more: str) -> int:
    return benchmark_data.main(["--data", str(data), *more])


def test_fetched_rows_are_those_of_the_hub_with_their_origin_and_are_not_fetched_again(hub, tmp_path, capsys) -> None:
    has, asked = hub
    has |= {"allenai/ai2_arc": [ROWS["arc_easy"]], "cais/mmlu": [ROWS["mmlu_anatomy"]]}
    for _ in range(2):
        assert fetch(tmp_path, "--tasks", "arc_easy,mmlu_anatomy") == 0
    assert asked == [("allenai/ai2_arc", "ARC-Easy", "test"), ("cais/mmlu", "anatomy", "test")]
    for name in ("arc_easy", "mmlu_anatomy"):
        path = data_file(tmp_path, BENCHMARKS[name])
        assert path is not None
        assert path.suffix == ".parquet"
        assert read_rows(path, BENCHMARKS[name]) == [ROWS[name]]
    path = tmp_path / "ai2_arc" / "ARC-Easy" / "test.parquet"
    assert json.loads(path.with_suffix(".origin.json").read_text()) == {
        "dataset": "allenai/ai2_arc",
        "config": "ARC-Easy",
        "split": "test",
        "sha256": sha256_file(path),
    }
    assert {p.name for p in path.parent.iterdir()} == {"test.parquet", "test.origin.json"}
    assert "arc_easy: " in capsys.readouterr().out


def test_no_network_is_said_for_each_task_and_the_others_are_fetched(hub, tmp_path: Path, capsys) -> None:
    has, _ = hub
    has["baber/piqa"] = [ROWS["piqa"]]
    assert fetch(tmp_path, "--tasks", "hellaswag,piqa,sciq") == 1
    error = capsys.readouterr().err
    assert "hellaswag: Rowan/hellaswag can't be had (Couldn't reach 'Rowan/hellaswag' on the Hub)" in error
    assert "sciq: allenai/sciq can't be had" in error
    assert data_file(tmp_path, BENCHMARKS["piqa"]) is not None
    assert data_file(tmp_path, BENCHMARKS["hellaswag"]) is None


def test_rows_without_labels_are_refused_and_nothing_is_left(hub, tmp_path: Path, capsys) -> None:
    has, _ = hub
    has["Rowan/hellaswag"] = [ROWS["hellaswag"], ROWS["hellaswag"] | {"label": ""}]
    assert fetch(tmp_path, "--tasks", "hellaswag") == 1
    assert "row 2: label = ''" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_a_killed_fetch_left_goes_with_the_next_one(hub, tmp_path: Path, monkeypatch) -> None:
    has, _ = hub
    has["baber/piqa"] = [ROWS["piqa"]]

    def killed() -> None:
        monkeypatch.setattr(benchmark_data, "read_rows", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        fetch(tmp_path, "--tasks", "piqa")

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".tmp"]
    assert fetch(tmp_path, "--tasks", "piqa") == 0
    path = data_file(tmp_path, BENCHMARKS["piqa"])
    assert path is not None
    assert {other.name for other in path.parent.iterdir()} == {path.name, f"{path.stem}.origin.json"}


def test_unknown_name_is_refused_before_anything_is_asked_for(hub, tmp_path: Path, capsys) -> None:
    assert fetch(tmp_path, "--tasks", "arc_easy,arc") == 2
    assert "'arc' is no benchmark" in capsys.readouterr().err
    assert hub[1] == []
