"""The trainer as its own process: killed, stopped and resumed, it ends with the same bits."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model import checkpoint, pretrain
from model.files import read_json, read_jsonl, write_json

SLOW = """
import sys, time
from model import pretrain
import model.session as session
step = session.TrainSession.train_step
session.TrainSession.train_step = lambda *arguments: (time.sleep(0.05), step(*arguments))[1]
sys.exit(pretrain.main(sys.argv[1:]))
"""
"""The trainer, its steps slowed down so that there is time to interrupt them."""


def start_slow(tiny, *more: str, submission: int = 1, shell: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, *tiny.arguments(submission, *more)]
    if shell:  # a parent in between, which can be killed
        command = ["/bin/sh", "-c", '"$@" & wait', "sh", *command]
    repository = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


def last_step(tiny) -> int:
    return max((r["step"] for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "train"), default=0)


def train(tiny, *more: str, submission: int = 1) -> int:
    return pretrain.main(tiny.arguments(submission, *more))


def final(tiny) -> dict:
    return checkpoint.load(checkpoint.verify(tiny.checkpoints / "final.pt").path)


def assert_same(left, right, where: str = "") -> None:
    """Every tensor `torch.equal`, every other value equal."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert left == right, where


def test_killed_stopped_and_resumed_run_equals_the_straight_run(make_run) -> None:
    straight, broken = make_run("straight"), make_run("broken")
    for run in (straight, broken):
        run.set(max_steps=24)
    assert train(straight) == 0

    process = start_slow(broken)  # killed in full course, after step 8 at the earliest
    wait_for(lambda: last_step(broken) >= 9, "step 9")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert (broken.run_dir / "LOCK").exists()

    process = start_slow(broken, submission=2)  # told to stop by SIGTERM, thrice
    wait_for(lambda: last_step(broken) >= 11 and len(read_jsonl(broken.run_dir / "ledger.jsonl")) == 1, "step 11")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "was killed" in output

    assert train(broken, "--until-step", "17", submission=3) == 75
    assert train(broken, submission=4) == 0

    assert_same(final(broken), final(straight))
    ledger = read_jsonl(broken.run_dir / "ledger.jsonl")
    assert [record["stop_reason"] for record in ledger] == ["killed", "SIGTERM", "until_step", "finished"]
    assert [record["exit_code"] for record in ledger] == [None, 75, 75, 0]
    assert ledger[0]["saved_step"] == 8
    assert ledger[0]["lost_steps"] == ledger[0]["to_step"] - 8 >= 1
    assert ledger[1]["from_step"] == 8
    assert [record["from_step"] for record in ledger[2:]] == [record["saved_step"] for record in ledger[1:3]]
    losses = {r["step"]: r["loss"] for r in read_jsonl(broken.run_dir / "metrics.jsonl") if r["kind"] == "train"}
    assert [losses[step] for step in range(1, 25)] == final(straight)["loss_history"]


def test_deadline_and_stop_file_stop_with_everything_saved(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from model.session import TrainSession

    tiny.set(max_steps=400, save_every_steps=1000)
    original, stop_file = TrainSession.train_step, tiny.root / "STOP"

    def step(self, *arguments):
        time.sleep(0.05)
        if self.step == stop_at:
            stop_file.touch()
        return original(self, *arguments)

    monkeypatch.setattr(TrainSession, "train_step", step)
    stop_at = -1
    began = time.monotonic()
    assert train(tiny, "--time-limit-s", "6") == 75  # the lead is a third of it
    assert 4 <= time.monotonic() - began < 6
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["lost_steps"]) == ("deadline", 0)
    assert record["saved_step"] == record["to_step"] == checkpoint.steps_in(tiny.checkpoints)[-1] > 0

    stop_at = record["to_step"] + 2
    assert train(tiny, "--stop-file", str(stop_file), submission=2) == 75
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["lost_steps"]) == ("stop_file", 0)
    assert record["saved_step"] >= stop_at
    assert not (tiny.run_dir / "LOCK").exists()


def test_parents_death_saves_and_a_second_trainer_is_refused_meanwhile(tiny, capsys) -> None:
    tiny.set(max_steps=400, save_every_steps=1000)
    parent = start_slow(tiny, "--watch-parent", shell=True)
    wait_for(lambda: last_step(tiny) >= 2, "step 2")
    pid = json.loads((tiny.run_dir / "LOCK").read_text())["pid"]
    assert pid != parent.pid

    before = {path: path.stat().st_mtime_ns for path in tiny.run_dir.glob("*.toml")}
    assert train(tiny, submission=2) == 73
    assert f"process {pid}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tiny.run_dir.glob("*.toml")} == before

    parent.kill()
    wait_for(lambda: bool(read_jsonl(tiny.run_dir / "ledger.jsonl")), "the ledger's record")
    parent.communicate(timeout=60)
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[0]
    assert (record["stop_reason"], record["exit_code"], record["pid"]) == ("parent_gone", 75, pid)
    assert record["saved_step"] == record["to_step"] >= 2
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or not (tiny.run_dir / "LOCK").exists(), "the lock's release")


def test_truncated_newest_checkpoint_falls_back_aloud_and_ends_the_same(make_run, capsys) -> None:
    straight, broken = make_run("straight"), make_run("broken")
    assert train(straight) == 0
    assert train(broken, "--until-step", "9") == 75
    newest = broken.checkpoints / "step_9.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    assert train(broken, submission=2) == 0
    told = capsys.readouterr()
    assert "step_9.pt: 5,000 bytes, its sidecar says" in told.err
    assert "continuing from step 8" in told.out
    assert_same(final(broken), final(straight))


def test_newest_checkpoint_that_the_disk_does_not_give_back_falls_back_aloud(tiny, capsys) -> None:
    assert train(tiny, "--until-step", "6") == 75
    broken = tiny.checkpoints / "step_6.pt"
    broken.unlink()
    broken.symlink_to("/proc/self/mem")  # a file whose first byte is an input/output error, of size 0
    write_json(broken.with_suffix(".json"), read_json(broken.with_suffix(".json")) | {"bytes": 0})
    assert train(tiny, "--until-step", "5", submission=2) == 75
    assert "step_6.pt: can't be read ([Errno 5] Input/output error)" in capsys.readouterr().err
    assert checkpoint.steps_in(tiny.checkpoints) == [4, 5, 6]


def test_no_whole_checkpoint_among_some_is_refused(tiny, capsys) -> None:
    assert train(tiny, "--until-step", "4") == 75
    (tiny.checkpoints / "step_4.pt").write_bytes(b"")
    assert train(tiny, submission=2) == 1
    assert "none of the 1 checkpoints is whole" in capsys.readouterr().err
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["exit_code"]) == ("error", 1)
    assert "none of the 1" in record["error"]


def test_micro_batch_and_accumulation_move_no_sample(make_run) -> None:
    coarse, fine = make_run("coarse"), make_run("fine")
    fine.set(micro_batch_size=1, accumulation=8)
    for run in (coarse, fine):
        run.set(max_steps=4)
        assert train(run) == 0
    difference = torch.tensor(final(coarse)["loss_history"]) - torch.tensor(final(fine)["loss_history"])
    assert difference.abs().max() < 1e-4


def test_other_micro_batches_in_mid_run_lose_the_same(make_run) -> None:
    straight, mixed = make_run("straight"), make_run("mixed")
    for run in (straight, mixed):
        run.set(micro_batch_size=2, accumulation=4)
    assert train(straight) == 0
    assert train(mixed, "--until-step", "5") == 75
    mixed.set(micro_batch_size=4, accumulation=2)
    assert train(mixed, submission=2) == 0
    difference = torch.tensor(final(mixed)["loss_history"]) - torch.tensor(final(straight)["loss_history"])
    assert difference.abs().max() < 1e-5
    assert final(mixed)["data_offset"] == final(straight)["data_offset"]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [("learning_rate", 2e-2, 2), ("max_steps", 40, 2), ("n_layer", 3, 2), ("save_every_steps", 3, 75)],
)
def test_another_configuration_is_refused_by_key_if_it_shapes_the_weights(tiny, capsys, key, value, code) -> None:
    assert train(tiny, "--until-step", "2") == 75
    tiny.set(**{key: value})
    assert train(tiny, "--until-step", "3", submission=2) == code
    told = capsys.readouterr().err
    assert f".{key} " in told
    assert str(value) in told


def test_another_corpus_is_refused(tiny, capsys) -> None:
    assert train(tiny, "--until-step", "2") == 75
    data = json.loads(tiny.manifest_path.read_text())
    tiny.manifest_path.write_text(json.dumps({**data, "extra": 1}))
    assert train(tiny, submission=2) == 1
    assert "was trained on the manifest" in capsys.readouterr().err


def test_another_corpus_is_taken_aloud_where_that_is_meant(tiny, capsys) -> None:
    assert train(tiny, "--until-step", "2") == 75
    data = json.loads(tiny.manifest_path.read_text())
    tiny.manifest_path.write_text(json.dumps({**data, "extra": 1}))
    assert train(tiny, "--accept-other-data", "--until-step", "4", submission=2) == 75
    assert "Going on with it as told" in capsys.readouterr().err
    assert train(tiny, "--until-step", "5", submission=3) == 75  # what it goes on with is now its own


def test_damaged_shard_is_refused_before_the_first_step(tiny, capsys) -> None:
    shard = tiny.root / "tokens/textbooks-00000-00.bin"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert train(tiny) == 1
    assert "textbooks-00000-00.bin" in capsys.readouterr().err
    assert not (tiny.run_dir / "metrics.jsonl").exists()


def test_finished_run_holds_all_its_records(tiny, capsys) -> None:
    assert train(tiny) == 0
    told = capsys.readouterr().out
    assert "\r" not in told
    assert sum(line.startswith("step ") for line in told.splitlines()) == 12
    metrics = read_jsonl(tiny.run_dir / "metrics.jsonl")
    steps = [record for record in metrics if record["kind"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert steps[-1]["learning_rate"] == tiny.config.training.min_learning_rate
    assert steps[-1]["tokens"] == 12 * 256
    assert steps[-1]["mfu"] is None
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.5
    heldout = [(record["step"], record["source"]) for record in metrics if record["kind"] == "heldout"]
    assert heldout == [(step, source) for step in (1, 6, 12) for source in ("wikipedia", "textbooks", "all")]
    assert [record["step"] for record in read_jsonl(tiny.run_dir / "samples.jsonl")] == [0, 6, 12]
    weights = read_jsonl(tiny.run_dir / "weights.jsonl")
    assert [record["step"] for record in weights] == [4, 8, 12]
    first, last = (record["tensors"]["lm_head.weight"]["histogram"] for record in (weights[0], weights[-1]))
    assert sum(first) == sum(last) == 272 * 32
    assert first != last
    assert (tiny.run_dir / "config.toml").read_bytes() == tiny.config_path.read_bytes()
    names = sorted(path.name for path in tiny.checkpoints.glob("*.pt"))
    assert names == ["final.pt", "step_12.pt", "step_4.pt", "step_8.pt"]
    assert train(tiny, submission=2) == 0
    assert read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]["checkpoint"]["path"] == "checkpoints/final.pt"
    assert len(read_jsonl(tiny.run_dir / "metrics.jsonl")) == len(metrics)


@pytest.mark.parametrize(("bad_steps", "code"), [({3, 4, 5}, 0), ({3, 4, 5, 6}, 65)])
def test_non_finite_loss_is_skipped_thrice_and_then_stops_unsaved(
    tiny, monkeypatch: pytest.MonkeyPatch, bad_steps: set[int], code: int
) -> None:
    from model.session import TrainSession

    original = TrainSession._micro_batch

    def poisoned(self, tokens):
        loss = original(self, tokens)
        return loss * float("nan") if self.step + 1 in bad_steps else loss

    monkeypatch.setattr(TrainSession, "_micro_batch", poisoned)
    assert train(tiny) == code
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    losses = {r["step"]: r["loss"] for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "train"}
    assert losses[3] is None
    if code == 0:
        assert all(torch.isfinite(tensor).all() for tensor in final(tiny)["model_state_dict"].values())
    else:
        assert (record["stop_reason"], record["to_step"], record["saved_step"]) == ("non_finite", 6, 4)
        assert checkpoint.steps_in(tiny.checkpoints) == [4]


def test_lock_lost_meanwhile_saves_nothing(tiny, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from model.session import TrainSession

    original = TrainSession.train_step

    def step(self, *arguments):
        (tiny.run_dir / "LOCK").unlink(missing_ok=True)
        return original(self, *arguments)

    monkeypatch.setattr(TrainSession, "train_step", step)
    assert train(tiny) == 73
    assert "removed or taken over" in capsys.readouterr().err
    assert checkpoint.steps_in(tiny.checkpoints) == []


def test_what_a_stop_left_undone_is_made_up(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from model import dry_step

    assert train(tiny, "--until-step", "5") == 75
    with monkeypatch.context() as patch:  # the stop comes while step 6 is being evaluated
        patch.setattr(dry_step, "heldout_scores", lambda *arguments: None)
        assert train(tiny, "--until-step", "6", submission=2) == 75
    assert train(tiny, submission=3) == 0
    metrics = read_jsonl(tiny.run_dir / "metrics.jsonl")
    assert {record["step"] for record in metrics if record["kind"] == "heldout"} == {1, 6, 12}


def test_dry_run_measures_and_leaves_nothing(tiny) -> None:
    out = tiny.root / "dry.json"
    before = sorted(tiny.root.rglob("*"))
    assert train(tiny, "--dry-run", str(out)) == 0
    figures = json.loads(out.read_text())
    assert {"step_s", "save_s", "eval_s", "peak_memory_gib", "checkpoint_bytes", "loss"} <= set(figures)
    assert figures["step_s"] > 0
    assert 5.4 < figures["loss"] < 5.8
    assert sorted(tiny.root.rglob("*")) == sorted([*before, out])


def test_stop_before_the_first_step_saves_nothing_and_may_go_on(tiny) -> None:
    (tiny.root / "STOP").touch()
    assert train(tiny, "--stop-file", str(tiny.root / "STOP")) == 75
    assert checkpoint.steps_in(tiny.checkpoints) == []
    assert train(tiny, "--until-step", "4", submission=2) == 75
    stamp = (tiny.checkpoints / "step_4.pt").stat().st_mtime_ns
    assert train(tiny, "--stop-file", str(tiny.root / "STOP"), submission=3) == 75
    assert (tiny.checkpoints / "step_4.pt").stat().st_mtime_ns == stamp


def test_configuration_alone_finds_corpus_and_folder_and_is_kept_whole(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RQWEN3_HOME", str(tiny.root))
    assert pretrain.main(["--config", str(tiny.config_path), "--until-step", "1"]) == 75
    sidecar = json.loads((tiny.checkpoints / "step_1.json").read_text())
    assert sidecar["config"]["training"]["beta2"] == 0.999  # a default, which the file does not name
    assert sidecar["config"]["model"]["vocab_size"] == 272
