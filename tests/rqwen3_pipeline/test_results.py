import json
from pathlib import Path

import pytest

from model.config import CoreConfig, RunConfig, TrainConfig
from model.errors import CheckpointError, ConfigError
from model.files import append_jsonl, read_json, sha256_bytes, write_json
from rqwen3_pipeline import result_commands, results
from rqwen3_pipeline.corpus import cloze
from rqwen3_pipeline.settings import RunRoot, Settings

EXPECTED = {"arc_easy": {"low": 0.3, "high": 0.5, "why": "a guess"}}


def run_config(**evaluation) -> RunConfig:
    shape = {"d_model": 8, "n_layer": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 8}
    return RunConfig(
        name="demo",
        model=CoreConfig(vocab_size=400, max_seq_len=32, **shape),
        training=TrainConfig(max_steps=20, warmup_steps=2, seq_len=32, micro_batch_size=4),
        sections={"evaluation": evaluation},
    )


@pytest.fixture
def programs(monkeypatch):
    """The programs that are run, instead of running them; `score_benchmarks` leaves its file."""
    seen = []

    def note(module, arguments, log=None):
        told = [str(argument) for argument in arguments]
        seen.append((module, told))
        if module == "model.score_benchmarks":
            out = Path(told[told.index("--out") + 1])
            write_json(out / "benchmarks.json", {"complete": True, "tasks": {}})
        return 0

    monkeypatch.setattr(results, "run_program", note)
    monkeypatch.setattr(result_commands, "run_here", note)
    return seen


def test_evaluation_config_reads_benchmarks_and_expectations():
    config = results.evaluation_config(run_config(items=5, benchmarks=["mmlu"], limit=3, expectations=EXPECTED))
    assert (config.items, config.benchmarks, config.limit) == (5, ("mmlu",), 3)
    assert config.expectations["arc_easy"] == results.Expectation(low=0.3, high=0.5, why="a guess")


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"benchmarks": ["arc"]}, "'arc' is no benchmark"),
        ({"limit": -1}, "evaluation.limit = -1"),
        ({"expectations": {"mmlu": {"low": 0.5, "high": 0.2}}}, "low = 0.5"),
        ({"expectations": {"mmlu": {"low": 0.1, "high": 0.2, "metric": "f1"}}}, "metric = 'f1'"),
        ({"expectations": {"mmlu": {"low": 0.1}}}, "lacks high"),
        ({"expectations": 3}, "table of tables"),
    ],
)
def test_evaluation_config_unusable_value_is_refused(evaluation, message):
    with pytest.raises(ConfigError, match=message):
        results.evaluation_config(run_config(**evaluation))


def test_expectations_are_written_once_and_never_after_a_score(tmp_path):
    root = RunRoot(tmp_path)
    assert results.keep_expectations(root, run_config()) is None
    first = results.keep_expectations(root, run_config(expectations=EXPECTED))
    assert first["tasks"] == {"arc_easy": {"metric": "acc", "low": 0.3, "high": 0.5, "why": "a guess"}}
    assert results.keep_expectations(root, run_config(expectations=EXPECTED)) == first
    other = {"arc_easy": {"low": 0.6, "high": 0.7}}
    second = results.keep_expectations(root, run_config(expectations=other))
    assert second["sha256"] != first["sha256"]  # no score yet: one may change one's mind
    write_json(root.evaluation("demo") / "step_5" / "benchmarks" / "arc_easy.json", {})
    assert results.keep_expectations(root, run_config(expectations=EXPECTED)) == second
    assert json.loads((root.evaluation("demo") / "expectations.json").read_text()) == second
    (root.evaluation("demo") / "expectations.json").unlink()
    assert results.keep_expectations(root, run_config(expectations=EXPECTED)) is None


def test_submission_is_scored_by_the_checkpoint_it_left(tmp_path, programs):
    root, run = RunRoot(tmp_path), run_config(benchmarks=["arc_easy", "mmlu"], limit=7, expectations=EXPECTED)
    with pytest.raises(CheckpointError, match="submission 01 of demo has left no checkpoint"):
        results.score_submission(root, run, 1, root.benchmarks)
    append_jsonl(root.experiment("demo") / "ledger.jsonl", {"submission": 1, "exit_code": 75, "saved_step": 12})
    with pytest.raises(CheckpointError, match=r"step_12\.pt: not there any more; retention keeps the last 3"):
        results.score_submission(root, run, 1, root.benchmarks)
    checkpoint = root.experiment("demo") / "checkpoints" / "step_12.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"")
    report = results.score_submission(root, run, 1, root.benchmarks)
    ((module, arguments),) = programs
    assert module == "model.score_benchmarks"
    told = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert told["--checkpoint"] == str(checkpoint)
    assert (told["--tasks"], told["--limit"]) == ("arc_easy,mmlu", "7")
    assert told["--out"] == str(root.evaluation("demo") / "step_12")
    assert (report["step"], report["complete"]) == (12, True)
    assert (root.evaluation("demo") / "expectations.json").is_file()
    assert "none configured" in results.score_submission(root, run_config(), 1, root.benchmarks)["benchmarks"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Settings of the demo in a run root with two checkpoints, the newer one without its sidecar."""
    monkeypatch.setenv("RQWEN3_HOME", str(tmp_path))
    settings = Settings()
    folder = settings.root.experiment("demo") / "checkpoints"
    for step in (3, 5):
        (folder / f"step_{step}.pt").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"step_{step}.pt").write_bytes(b"abc")
    write_json(folder / "step_3.json", {"bytes": 3, "sha256": "x", "step": 3})
    return settings, folder


def arguments_of(programs) -> dict[str, str]:
    told = [argument for argument in programs[-1][1] if argument != "--force"]
    return dict(zip(told[::2], told[1::2], strict=True))


def test_export_command_takes_the_newest_whole_checkpoint_and_then_the_final_one(site, programs):
    settings, folder = site
    result_commands.export_checkpoint(settings, None, "bf16", None, None, "q8_0", True)
    told = arguments_of(programs)
    assert told["--checkpoint"] == str(folder / "step_3.pt")
    assert told["--out"] == str(settings.root.path / "exports" / "demo-step_3-bf16")
    assert told["--gguf"] == "q8_0"
    assert "--force" in programs[-1][1]
    (folder / "final.pt").write_bytes(b"abc")
    result_commands.export_checkpoint(settings, None, "fp32", None, None, None, False)
    assert arguments_of(programs)["--out"] == str(settings.root.path / "exports" / "demo")


def test_eval_command_never_lets_a_limited_score_stand_in_place_of_a_whole_one(site, programs, tmp_path):
    settings, _folder = site
    for limit, out in ((None, "step_3"), (9, "step_3/first-9")):
        result_commands.score(settings, None, None, ["mmlu"], None, None, {"limit": limit})
        told = arguments_of(programs)
        assert told["--out"] == str(settings.root.evaluation("demo") / out)
        assert told["--data"] == str(settings.root.benchmarks)
        assert told["--tasks"] == "mmlu"
    for through in ("own", "transformers"):
        result_commands.score(settings, None, tmp_path / "smol", [], tmp_path, None, {"through": through})
        assert arguments_of(programs)["--out"].endswith(f"published/smol-{through}")
    assert "hellaswag" in arguments_of(programs)["--tasks"]
    with pytest.raises(ConfigError, match="'arc' is no benchmark"):
        result_commands.score(settings, None, None, ["arc"], None, None, {})


def test_commands_without_a_checkpoint_say_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RQWEN3_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no checkpoint yet.*rqwen3 run"):
        result_commands.export_checkpoint(Settings(), None, "fp32", None, None, None, False)


def test_evaluation_renews_the_card_of_this_checkpoints_export_and_exports_again_where_it_is_anothers(
    tmp_path, programs, monkeypatch
):
    monkeypatch.setattr(cloze, "write_cloze_items", lambda *_, **__: {})
    root, run = RunRoot(tmp_path), run_config()
    out, checkpoints = root.export("demo"), root.experiment("demo") / "checkpoints"
    told = {"tasks": {"heldout_cloze": {"acc": 0.5}}, "engine": "own", "checkpoint": {"sha256": "a"}}
    for path, content in (
        (root.evaluation("demo") / "scores.json", told),
        (checkpoints / "final.json", {"sha256": "a", "step": 20}),
        (out / "export.json", {"checkpoint_sha256": "b", "read_back": {}, "files": {}}),
    ):
        path.parent.mkdir(parents=True)
        write_json(path, content)
    (out / "README.md").write_text("of b")
    results.evaluate_model(root, run, root.benchmarks)
    assert [module for module, _ in programs] == ["model.evaluate", "model.huggingface"]
    assert (out / "README.md").read_text() == "of b"
    record = {"checkpoint_sha256": "a", "dtype": "fp32", "tokenizer_ids": 300, "files": {"README.md": {}}}
    write_json(out / "export.json", record | {"read_back": {}})
    programs.clear()
    results.evaluate_model(root, run, root.benchmarks)
    assert [module for module, _ in programs] == ["model.evaluate"]
    card = (out / "README.md").read_bytes()
    assert b"| heldout_cloze | accuracy | 0.5000 |" in card
    assert read_json(out / "export.json")["files"]["README.md"]["sha256"] == sha256_bytes(card)
