import importlib.util
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model import checkpoint, huggingface, score_benchmarks
from model.benchmark_data import go_offline
from model.benchmarks import BENCHMARKS, data_file, read_rows
from model.config import load_run_config
from model.errors import CheckpointError, ConfigError, CorpusError
from model.files import read_json
from model.rqwen3 import RQwen3
from model.score_benchmarks import Inputs, combine, score


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """As in a process of its own, where the switch is set before the libraries read it."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra `evaluation`")

WORDS = ["water", "stone", "light", "ash", "river", "moon", "heat", "iron", "leaf", "salt", "wind", "glass"]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "eval"


def arc_rows(n: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    rows = []
    for number in range(n):
        choices = draw.sample(WORDS, 4)
        rows.append(
            {
                "id": f"q{number}",
                "question": f"Which {draw.choice(WORDS)} follows the {draw.choice(WORDS)}?",
                "choices": {"text": choices, "label": ["A", "B", "C", "D"]},
                "answerKey": draw.choice("ABCD"),
            }
        )
    return rows


def mmlu_rows(n: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    return [
        {"question": f"Name {draw.choice(WORDS)}.", "choices": draw.sample(WORDS, 4), "answer": draw.randrange(4)}
        for _ in range(n)
    ]


def write(data: Path, name: str, rows: list[dict]) -> None:
    path = data / BENCHMARKS[name].folder / f"{BENCHMARKS[name].split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tiny, tmp_path: Path):
    """A checkpoint of a random model of long context, its export, and data of three tasks."""
    tiny.set(max_seq_len=512)
    model = RQwen3(tiny.config.model)
    model.initialise(5)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    state = dict.fromkeys(checkpoint.KEYS, 0) | {"step": 12, "model_state_dict": model.state_dict()}
    checkpoint.save(tiny.checkpoints / "step_12.pt", state, {"data_fingerprint": tiny.manifest.sha256})
    data = tmp_path / "data"
    write(data, "arc_easy", arc_rows(40, 1))
    write(data, "mmlu_anatomy", mmlu_rows(12, 2))
    write(data, "mmlu_virology", mmlu_rows(20, 3))
    return tiny, data, tmp_path / "out"


def inputs(place, *tasks: str, **more) -> Inputs:
    tiny, data, out = place
    return Inputs(
        checkpoint=tiny.checkpoints / "step_12.pt",
        config=tiny.config_path,
        tokenizer=tiny.root / "tokenizer.json",
        **{"data": data, "out": out, "tasks": tasks, "device": "cpu", **more},
    )


def quiet(line: str) -> None:
    assert line


def test_scores_hold_chance_errors_and_what_they_were_made_from(place) -> None:
    out = place[2]
    result = score(inputs(place, "arc_easy"), quiet)
    arc = result["tasks"]["arc_easy"]
    assert (arc["n"], arc["chance"], arc["limited"]) == (40, 0.25, False)
    assert arc["acc_stderr"] == pytest.approx(math.sqrt(arc["acc"] * (1 - arc["acc"]) / 39))
    assert arc["data"] == {"dataset": "allenai/ai2_arc", "config": "ARC-Easy", "split": "test", "rows": 40}
    protocol = result["protocol"]
    assert (protocol["shots"], protocol["limit"], protocol["step"]) == (0, None, 12)
    assert protocol["engine_version"] == "0.4.13"
    assert "end-of-text" in protocol["start_token"]
    assert result["versions"]["lm_eval"] == "0.4.13"
    assert result["complete"]
    assert read_json(out / "benchmarks.json") == result


def test_finished_task_is_not_asked_again_and_an_unfinished_evaluation_goes_on(place, monkeypatch) -> None:
    from model import harness

    asked: list[str] = []
    real = harness.score_benchmark

    def killed_at_virology(model, task, rows, limit):
        asked.append(task.name)
        if task.name == "mmlu_virology" and asked.count(task.name) == 1:
            raise KeyboardInterrupt
        return real(model, task, rows, limit)

    monkeypatch.setattr(harness, "score_benchmark", killed_at_virology)
    wanted = inputs(place, "arc_easy", "mmlu_anatomy", "mmlu_virology")
    with pytest.raises(KeyboardInterrupt):
        score(wanted, quiet)
    assert not (wanted.out / "benchmarks.json").exists()
    score(wanted, quiet)
    assert asked == ["arc_easy", "mmlu_anatomy", "mmlu_virology", "mmlu_virology"]
    first = score(wanted, quiet)
    assert len(asked) == 4
    assert score(inputs(place, "arc_easy", batch=3), quiet)["tasks"]["arc_easy"] == first["tasks"]["arc_easy"]
    assert len(asked) == 4
    write(place[1], "arc_easy", arc_rows(40, 9))
    score(wanted, quiet)
    assert asked[4:] == ["arc_easy"]  # other data, other scores; the rest stays


def test_limited_scores_say_so(place) -> None:
    arc = score(inputs(place, "arc_easy", limit=10), quiet)["tasks"]["arc_easy"]
    assert (arc["n"], arc["limited"]) == (10, True)


def test_group_score_equals_that_over_all_its_questions_and_names_what_is_missing(place) -> None:
    result = score(inputs(place, "mmlu"), quiet)
    mmlu = result["tasks"]["mmlu"]
    right = []
    for name, n in (("mmlu_anatomy", 12), ("mmlu_virology", 20)):
        piece = read_json(place[2] / "benchmarks" / f"{name}.json")
        right += [1.0] * round(piece["acc"] * n) + [0.0] * (n - round(piece["acc"] * n))
    assert mmlu["acc"] == pytest.approx(sum(right) / 32)
    assert (mmlu["n"], mmlu["subtasks"], mmlu["subtasks_wanted"], mmlu["limited"]) == (32, 2, 57, True)
    assert "over 2 of 57 parts only" in mmlu["reason"]
    assert "mmlu_abstract_algebra" in mmlu["reason"]
    assert not result["complete"]


def test_combine_errors_equal_the_harness_pooled_ones() -> None:
    from lm_eval.api.metrics import pooled_sample_stderr

    pieces = [
        {"acc": 0.3, "acc_stderr": 0.05, "n": 80, "chance": 0.25, "limited": False},
        {"acc": 0.6, "acc_stderr": 0.1, "n": 25, "chance": 0.5, "limited": False},
    ]
    both = combine(pieces)
    assert both["acc_stderr"] == pytest.approx(pooled_sample_stderr([0.05, 0.1], [80, 25]))
    assert both["acc"] == pytest.approx((0.3 * 80 + 0.6 * 25) / 105)
    assert both["chance"] == pytest.approx((0.25 * 80 + 0.5 * 25) / 105)


def test_task_without_data_or_with_damaged_data_has_no_score_and_says_why(place) -> None:
    rows = arc_rows(5, 1)
    del rows[3]["answerKey"]
    write(place[1], "arc_challenge", rows)
    result = score(inputs(place, "arc_challenge", "piqa", "arc_easy"), quiet)
    assert result["tasks"]["arc_challenge"]["acc"] is None
    assert "row 4: lacks answerKey" in result["tasks"]["arc_challenge"]["reason"]
    assert result["tasks"]["piqa"]["acc"] is None
    assert "baber/piqa can't be had" in result["tasks"]["piqa"]["reason"]
    assert "--prefetch" in result["tasks"]["piqa"]["reason"]
    assert result["tasks"]["arc_easy"]["acc"] is not None
    assert not result["complete"]
    assert not (place[2] / "benchmarks" / "piqa.json").exists()


def test_model_that_answers_nan_has_no_score_in_any_group(place) -> None:
    tiny = place[0]
    path = tiny.checkpoints / "step_12.pt"
    state = checkpoint.load(path)
    state["model_state_dict"]["model.norm.weight"][0] = math.nan
    checkpoint.save(path, state, {})
    result = score(inputs(place, "arc_easy", "mmlu"), quiet)
    for task in result["tasks"].values():
        assert task["acc"] is None
        assert "not finite" in task["reason"]
    json.dumps(result, allow_nan=False)


def test_score_through_transformers_and_directly_agree_in_log_likelihood(place, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    from model.harness import through_transformers

    tiny, data, _ = place
    out = tmp_path / "export"
    run = load_run_config(tiny.config_path)
    huggingface.export(tiny.checkpoints / "step_12.pt", run, tiny.root / "tokenizer.json", out)
    go_offline()
    rows = read_rows(data_file(data, BENCHMARKS["arc_easy"]), BENCHMARKS["arc_easy"])[:20]
    texts = [(f"Question: {row['question']}\nAnswer:", f" {c}") for row in rows for c in row["choices"]["text"]]
    texts += [("", " water"), ("ends in a space ", "stone"), ("line\n", "naïve 日本")]
    requests = [Instance("loglikelihood", {}, text, i) for i, text in enumerate(texts)]
    found = {}
    for batch in (1, 7):
        theirs = through_transformers(out, batch, "cpu")
        direct = score_benchmarks._harness_model(inputs(place, "arc_easy", batch=batch), torch.device("cpu"))
        for name, model in (("export", theirs), ("direct", direct)):
            found[name, batch] = [log for log, _ in model.loglikelihood(requests, disable_tqdm=True)]
    reference = found["direct", 1]
    assert len({round(log, 2) for log in reference}) > 40, "or the test could not tell them apart"
    for logs in found.values():
        assert logs == pytest.approx(reference, abs=1e-4)
    directly = score(inputs(place, "arc_easy"), quiet)["tasks"]["arc_easy"]
    folder = Inputs(weights=out, through="transformers", data=data, out=tmp_path / "hf", tasks=("arc_easy",))
    exported = score(folder, quiet)["tasks"]["arc_easy"]
    assert exported == directly


def test_random_model_is_at_chance_within_its_error_on_real_questions(place) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the real benchmark rows beside the checkout")
    result = score(inputs(place, "arc_easy", "winogrande", "mmlu", data=SHARED), quiet)
    for name, task in result["tasks"].items():
        assert abs(task["acc"] - task["chance"]) < 3 * task["acc_stderr"], name
        assert task["n"] >= 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": None}, "--weights"),
        ({"tokenizer": None}, "--tokenizer"),
        ({"through": "transformers"}, "--through"),
        ({"limit": 0}, "--limit"),
        ({"batch": 0}, "--batch"),
    ],
)
def test_inputs_unusable_flag_is_refused(place, change: dict, message: str) -> None:
    plain = {name: getattr(inputs(place, "arc_easy"), name) for name in ("checkpoint", "config", "tokenizer")}
    with pytest.raises(ConfigError, match=message):
        Inputs(**{"data": place[1], "out": place[2], "tasks": ("arc_easy",), **plain, **change})


def test_checkpoint_without_its_sidecar_and_a_foreign_tokenizer_are_refused(place, tmp_path: Path) -> None:
    tiny = place[0]
    foreign = json.loads((tiny.root / "tokenizer.json").read_text())
    foreign["added_tokens"] = []
    (tmp_path / "foreign.json").write_text(json.dumps(foreign))
    with pytest.raises(CorpusError, match="end-of-text id None"):
        score(replace(inputs(place, "arc_easy"), tokenizer=tmp_path / "foreign.json"), quiet)
    (tiny.checkpoints / "step_12.json").unlink()
    with pytest.raises(CheckpointError, match=r"sidecar step_12\.json is missing"):
        score(inputs(place, "arc_easy"), quiet)


def test_main_prints_every_score_with_its_chance(place, capsys) -> None:
    tiny, data, out = place
    arguments = ["--checkpoint", tiny.checkpoints / "step_12.pt", "--config", tiny.config_path]
    arguments += ["--tokenizer", tiny.root / "tokenizer.json", "--data", data, "--out", out, "--device", "cpu"]
    assert score_benchmarks.main([*map(str, arguments), "--tasks", "arc_easy,mmlu"]) == 0
    printed = capsys.readouterr().out
    assert "arc_easy: acc" in printed
    assert "over 40 (chance 0.250)" in printed
    assert "mmlu (2 of 57 parts): acc" in printed
    assert score_benchmarks.main([*map(str, arguments), "--tasks", "arc"]) == 2
