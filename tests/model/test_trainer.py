"""What the trainer does around its steps: saves in the background, the dry step, the clock."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from model import checkpoint, dry_step, pretrain, snapshot
from model.files import read_jsonl
from model.session import TrainSession
from tests.model.conftest import REPOSITORY
from tests.model.test_pretrain import assert_same, final, last_step, train, wait_for


def add(tiny, text: str) -> None:
    """Append keys to [training]."""
    tiny.config_path.write_text(tiny.config_path.read_text() + text + "\n")


def records(tiny, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(tiny.run_dir / "metrics.jsonl") if record["kind"] == kind]


def test_saves_in_background_and_foreground_train_the_same_bits(make_run) -> None:
    runs = {value: make_run(value) for value in ("true", "false")}
    for value, run in runs.items():
        add(run, f"background_save = {value}")
        assert train(run) == 0
    assert_same(final(runs["true"]), final(runs["false"]))
    for value, run in runs.items():
        saves = records(run, "save")
        assert [(save["step"], save["background"]) for save in saves] == [
            (step, value == "true") for step in (4, 8, 12)
        ]
        assert [save["bytes"] for save in saves][-1] == (run.checkpoints / "step_12.pt").stat().st_size
        assert all(0 < save["stall_s"] <= save["seconds"] for save in saves)


def test_dry_step_changes_no_bit_of_the_run(make_run, capsys) -> None:
    runs = {value: make_run(value) for value in ("true", "false")}
    for value, run in runs.items():
        run.config_path.write_text(run.config_path.read_text().replace("head_dim = 8", "head_dim = 8\ndropout = 0.2"))
        add(run, f"dry_step = {value}")
        assert train(run) == 0
        assert ("dry step: step_s" in capsys.readouterr().out) is (value == "true")
        assert (run.run_dir / "dry_steps.jsonl").exists() is (value == "true")
    assert_same(final(runs["true"]), final(runs["false"]))


def test_dry_step_that_runs_out_of_memory_ends_the_submission_with_the_plan(
    tiny, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.64 GiB.")

    monkeypatch.setattr(TrainSession, "_micro_batch", refuse)
    assert train(tiny) == 71
    assert "out of memory in the dry step on cpu" in capsys.readouterr().err
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["to_step"]) == ("out_of_memory", 0)
    assert "The plan, in GiB: weights" in record["error"]
    assert sorted(path.name for path in tiny.run_dir.iterdir()) == ["config.toml", "ledger.jsonl"]


def test_out_of_memory_in_full_course_is_told_with_the_plan_too(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainSession.train_step

    def step(self, *arguments):
        if self.step == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, *arguments)

    monkeypatch.setattr(TrainSession, "train_step", step)
    assert train(tiny) == 71
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["exit_code"]) == ("out_of_memory", 71)
    assert (record["to_step"], record["saved_step"]) == (5, 4)
    assert "while training" in record["error"]


def test_stop_while_a_save_is_under_way_waits_and_writes_no_step_twice(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    original, written, stop_file = torch.save, list[int](), tiny.root / "STOP"

    def slow(state: dict[str, Any], *arguments: Any) -> None:
        written.append(state["step"])
        if state["step"] == 4:  # the stop comes while this is written, at the very step it holds
            assert threading.current_thread() is not threading.main_thread()
            stop_file.touch()
            time.sleep(1.0)
        original(state, *arguments)

    add(tiny, "dry_step = false")
    monkeypatch.setattr(torch, "save", slow)
    step = TrainSession.train_step

    def waiting(self, *arguments):
        if self.step == 4:
            wait_for(stop_file.exists, "the stop file")
            time.sleep(0.6)  # the stop file is looked at twice a second
        return step(self, *arguments)

    monkeypatch.setattr(TrainSession, "train_step", waiting)
    assert train(tiny, "--stop-file", str(stop_file)) == 75
    assert written == [4]
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["saved_step"], record["lost_steps"]) == ("stop_file", 4, 0)


def test_save_that_fails_in_the_background_is_tried_again_and_training_goes_on(
    tiny, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    original, failed = torch.save, list[int]()

    def once(state: dict[str, Any], *arguments: Any) -> None:
        if state["step"] == 4 and not failed:
            failed.append(4)
            raise OSError(5, "Input/output error")
        original(state, *arguments)

    monkeypatch.setattr(torch, "save", once)
    assert train(tiny) == 0
    told = capsys.readouterr().err
    assert "step_4.pt: could not be written" in told
    assert "while training waits" in told
    assert checkpoint.verify(tiny.checkpoints / "final.pt").step == 12
    saves = {record["step"]: record["background"] for record in records(tiny, "save")}
    assert 4 not in saves or not saves[4]
    assert min(saves) <= 8


def test_checkpoint_that_the_start_found_damaged_never_costs_a_good_one_its_place(tiny, capsys) -> None:
    tiny.config_path.write_text(tiny.config_path.read_text().replace("keep_first_step = 4", "keep_first_step = 0"))
    assert train(tiny, "--until-step", "6") == 75
    newest = tiny.checkpoints / "step_6.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    assert train(tiny, "--until-step", "8", submission=2) == 75
    assert "step_6.pt: SHA-256" in capsys.readouterr().err
    assert checkpoint.steps_in(tiny.checkpoints) == [4, 6, 8]
    assert train(tiny, "--until-step", "8", submission=3) == 75  # which meets no damaged one on its way
    assert checkpoint.steps_in(tiny.checkpoints) == [4, 6, 8]
    assert newest.read_bytes() == data
    assert train(tiny, submission=4) == 0
    assert checkpoint.steps_in(tiny.checkpoints) == [6, 8, 12]


def test_evaluation_that_would_not_end_in_time_is_left_to_the_next_submission(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dry_step.take

    def slow_evaluation(*arguments):
        measured = original(*arguments)
        return {**measured, "eval_s": 20.0}  # as if it had taken so long

    tiny.set(max_steps=12, eval_every_steps=5, save_every_steps=100)
    add(tiny, "lead_s = 5.0")
    with monkeypatch.context() as patch:
        patch.setattr(dry_step, "take", slow_evaluation)
        assert train(tiny, "--time-limit-s", "20") == 75
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["lost_steps"]) == ("deadline", 0)
    assert record["seconds"] < 15
    assert (record["saved_step"], records(tiny, "heldout")) == (1, [])  # the first step's evaluation
    assert train(tiny, submission=2) == 0
    assert {record["step"] for record in records(tiny, "heldout")} == {5, 10, 12}


def test_save_that_would_not_end_in_time_stops_the_submission_saved(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainSession.train_step
    tiny.set(max_steps=12, save_every_steps=2, eval_every_steps=100, sample_every_steps=100)
    add(tiny, "lead_s = 1.0\ndry_step = false")

    def step(self, should_stop, waiting):
        result = original(self, should_stop, waiting)
        if self.step == 2:
            watch = should_stop.__self__
            watch.save_s, watch.time_limit_s = 10.0, time.monotonic() - watch.started + 20.0
        return result

    monkeypatch.setattr(TrainSession, "train_step", step)
    assert train(tiny) == 75
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
    assert (record["stop_reason"], record["saved_step"], record["lost_steps"]) == ("deadline", 2, 0)
    assert [save["background"] for save in records(tiny, "save")] == [False]


def test_save_by_the_clock_comes_beside_those_by_steps_and_changes_no_bit(make_run) -> None:
    runs = {value: make_run(value) for value in ("0", "1e-9")}
    for value, run in runs.items():
        add(run, f"save_every_minutes = {float(value)}")
        assert train(run) == 0
    assert_same(final(runs["0"]), final(runs["1e-9"]))
    assert [save["step"] for save in records(runs["1e-9"], "save")] == list(range(1, 13))
    assert checkpoint.steps_in(runs["1e-9"].checkpoints) == [4, 11, 12]


def test_stop_while_sampling_leaves_no_cut_sample_and_it_is_made_up(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    from model import generate

    straight, stopped = make_run("straight"), make_run("stopped")
    assert train(straight) == 0
    stop_file, original = stopped.root / "STOP", generate.choose

    def choose(*arguments):
        if (stopped.run_dir / "samples.jsonl").exists():  # the sample before the first step is there
            stop_file.touch()
            time.sleep(0.6)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "choose", choose)
        assert train(stopped, "--stop-file", str(stop_file)) == 75
    assert [record["step"] for record in read_jsonl(stopped.run_dir / "samples.jsonl")] == [0]
    stop_file.unlink()
    assert train(stopped, submission=2) == 0
    texts = [
        [(record["step"], record["text"]) for record in read_jsonl(run.run_dir / "samples.jsonl")]
        for run in (straight, stopped)
    ]
    assert texts[0] == texts[1]


def test_learning_rate_follows_the_formula_through_every_resume(tiny) -> None:
    tiny.set(max_steps=20, warmup_steps=5, save_every_steps=7)
    for submission, until in enumerate((2, 5, 6, 13, 19), start=1):  # in the warm-up, at its end, in the cosine
        assert train(tiny, "--until-step", str(until), submission=submission) == 75
    assert train(tiny, submission=6) == 0
    rates = [record["learning_rate"] for record in records(tiny, "train")]
    expected = [1e-2 * step / 5 for step in range(1, 6)]
    expected += [1e-3 + (1 + math.cos(math.pi * (step - 5) / 15)) / 2 * 9e-3 for step in range(6, 21)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert rates[-1] == 1e-3
    assert checkpoint.load(tiny.checkpoints / "final.pt")["scheduler_state_dict"]["last_learning_rate"] == 1e-3


def test_every_signal_saves_and_a_second_one_changes_nothing_to_the_very_end(tiny) -> None:
    tiny.set(max_steps=100_000, warmup_steps=3, save_every_steps=50_000, eval_every_steps=50_000)
    for submission, number in enumerate((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), start=1):
        process = tiny.start(submission)
        reached = last_step(tiny)
        wait_for(lambda reached=reached: last_step(tiny) > reached, "a step")
        process.send_signal(number)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert process.returncode == 75, process.communicate()[0]
        process.communicate()
        record = read_jsonl(tiny.run_dir / "ledger.jsonl")[-1]
        assert (record["stop_reason"], record["lost_steps"]) == (number.name, 0)


def test_log_in_a_file_has_its_first_lines_soon_and_its_last_after_a_kill(tiny) -> None:
    tiny.set(max_steps=100_000, warmup_steps=3, save_every_steps=50_000, eval_every_steps=50_000)
    log = tiny.root / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "model.pretrain", *tiny.arguments()], cwd=REPOSITORY, stdout=file, stderr=file
        )
    wait_for(lambda: "step " in log.read_text(), "the first step in the log")
    wait_for(lambda: last_step(tiny) > 5, "step 5")
    process.kill()
    process.wait()
    logged = [line for line in log.read_text().splitlines() if line.startswith("step ")]
    assert int(logged[-1].split("/")[0].split()[1]) >= last_step(tiny) - 1


def test_kill_between_sidecar_and_rename_of_the_first_checkpoint_blocks_nothing(tiny) -> None:
    assert train(tiny, "--until-step", "4") == 75
    (tiny.checkpoints / "step_4.pt").unlink()  # as it is before the rename
    assert train(tiny, submission=2) == 0
    assert checkpoint.steps_in(tiny.checkpoints) == [4, 8, 12]


def test_what_a_killed_retention_left_is_removed_at_the_next_start(tiny) -> None:
    assert train(tiny, "--until-step", "12") == 0
    for name in ("step_6.json", "step_7.pt", "step_7.json"):
        source = tiny.checkpoints / f"step_4{Path(name).suffix}"
        (tiny.checkpoints / name).write_bytes(source.read_bytes())
    (tiny.checkpoints / ".step_9.pt.4711.tmp").write_bytes(b"half")
    assert train(tiny, submission=2) == 0
    names = sorted(path.name for path in tiny.checkpoints.iterdir())
    assert names == sorted(
        f"{stem}.{end}" for stem in ("final", "step_4", "step_8", "step_12") for end in ("json", "pt")
    )


def test_without_memory_for_a_copy_the_run_saves_while_it_waits(tiny, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(snapshot, "free_host_bytes", lambda: 2**20)
    assert train(tiny) == 0
    assert "too little free main memory" in capsys.readouterr().err
    assert [save["background"] for save in records(tiny, "save")] == [False] * 3


def test_phases_are_announced_where_asked(tiny) -> None:
    assert pretrain.main([*tiny.arguments(), "--phases", str(tiny.root / "phases")]) == 0
    lines = [json.loads(line) for line in (tiny.root / "phases").read_text().splitlines()]
    seen = {line["phase"] for line in lines if line["within"] is None}
    assert {"start_up", "dry_step", "micro_batch", "optimizer_step", "evaluation", "sampling", "snapshot"} <= seen
    assert {"writing", "hashing", "sidecar", "rename", "prune"} <= {
        line["phase"] for line in lines if line["background"]
    }
    windows = [
        name for line in lines if line["phase"] == "micro_batch" and not line["within"] for name in line["windows"]
    ]
    assert len(windows) == 12 * 8
