"""The torture campaign in its shorter form, and its verdict on runs that something is wrong with."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.torture import PHASES

REPOSITORY = Path(__file__).resolve().parents[2]
KEYS = [
    *("kills", "kills_by_phase", "bitwise_equal", "windows_missed", "windows_repeated", "unloadable"),
    "max_steps_lost_on_warning",
]


def run(*arguments: str, timeout_s: float) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON object of the last line, and all that was said."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_short_campaign_loses_nothing_and_its_verdict_can_fail(tmp_path: Path) -> None:
    folder = tmp_path / "campaign"
    campaign = ("-m", "bench.torture", "--kills", "30", "--compile-kills", "0", "--folder", str(folder))
    code, figures, said = run(*campaign, timeout_s=2000)
    assert code == 0, said[-3000:]
    assert list(figures) == KEYS
    assert (figures["kills"], set(figures["kills_by_phase"])) == (30, set(PHASES))
    assert figures["bitwise_equal"]
    assert (figures["windows_missed"], figures["windows_repeated"], figures["unloadable"]) == (0, 0, 0)
    assert figures["max_steps_lost_on_warning"] <= 1
    for spoil, key, wrong in SPOILS:
        spoiled = tmp_path / "spoiled"
        shutil.copytree(folder, spoiled)
        spoil(spoiled)
        code, figures, said = run("bench/torture_verdict.py", str(spoiled), timeout_s=300)
        assert code == 1, said
        assert wrong(figures[key]) if key else "left over" in said, said
        shutil.rmtree(spoiled)


def other_weight(folder: Path) -> None:
    final = folder / "round-01/checkpoints/final.pt"
    state = torch.load(final, weights_only=True)
    state["model_state_dict"]["lm_head.weight"][0, 0] += 1e-6
    final.unlink()  # a hard link of the last step
    torch.save(state, final)


def change_journal(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "round-01.phases"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        change(lines)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return spoil


def read_again(lines: list[dict[str, Any]]) -> None:
    micro_batches = [line for line in lines if line["phase"] == "micro_batch" and line["within"] is None]
    micro_batches[-1]["windows"] = micro_batches[-2]["windows"]


def torn_checkpoint(folder: Path) -> None:
    with (folder / "states.jsonl").open("a") as file:
        file.write(json.dumps({"run": "round-01", "newest": 120, "wrong": ["step_5.pt: cut"]}) + "\n")


def lost_checkpoint(folder: Path) -> None:
    with (folder / "states.jsonl").open("a") as file:
        for newest in (50, 45):
            file.write(json.dumps({"run": "a run of its own", "newest": newest, "wrong": []}) + "\n")


SPOILS: list[tuple[Callable[[Path], object], str, Callable[[Any], bool]]] = [
    (other_weight, "bitwise_equal", lambda value: value is False),
    (change_journal(read_again), "windows_repeated", lambda value: value == 2),
    (change_journal(read_again), "windows_missed", lambda value: value == 2),
    (torn_checkpoint, "unloadable", lambda value: value == 1),
    (lost_checkpoint, "unloadable", lambda value: value == 1),
    (lambda folder: (folder / "round-01/checkpoints/.step_9.pt.7.tmp").write_bytes(b""), "", bool),
    (lambda folder: (folder / "round-01/LOCK").write_text("{}"), "", bool),
]
"""What is done to the files of a good campaign, and which figure must then be wrong."""


def test_steps_lost_count_from_what_the_next_process_trains_first() -> None:
    from bench.torture_verdict import steps_lost_on_warning

    def line(pid: int, phase: str, step: int) -> dict[str, Any]:
        return {"pid": pid, "phase": phase, "step": step, "within": None}

    first = [line(1, "micro_batch", 1), *(line(1, "step_done", step) for step in range(1, 10))]
    journal = [*first, line(2, "start_up", 0), line(3, "micro_batch", 7), line(3, "step_done", 7)]
    warned, killed = {"pid": 1, "signals": ["SIGTERM", "SIGUSR1"]}, {"pid": 1, "signals": ["SIGTERM", "SIGKILL"]}
    assert steps_lost_on_warning(journal, [warned]) == 3
    assert steps_lost_on_warning(journal, [killed]) == 0


def test_windows_of_a_step_are_those_of_its_last_completion() -> None:
    from bench.torture_verdict import windows_read

    def life(pid: int, step: int, windows: list[str], *, done: bool) -> list[dict[str, Any]]:
        batches = [{"pid": pid, "phase": "micro_batch", "step": step, "within": None, "windows": [w]} for w in windows]
        ended = {"pid": pid, "phase": "step_done", "step": step, "within": None}
        return [*batches, ended] if done else batches

    dry = [{**line, "within": "dry_step"} for line in life(1, 1, ["x"], done=True)]
    journal = [
        *dry,
        *life(1, 1, ["a", "b"], done=True),
        *life(2, 1, ["a"], done=False),
        *life(3, 1, ["c", "d"], done=True),
    ]
    assert windows_read(journal) == {1: ["c", "d"]}
