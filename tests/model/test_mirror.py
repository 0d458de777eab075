import json
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from model import mirror
from model.attempts import begun_steps
from model.errors import EnvironmentProblem
from model.files import append_jsonl, read_jsonl
from model.metrics import Attempt, RunLog
from model.mirror import open_mirror, require_package, standing
from tests.model.conftest import REPOSITORY


def line(submission: int, step: int, loss: float | None) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "submission": submission, "attempt": 1}


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a scalar."""
    shown = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return [(event.step, event.value) for event in shown.Scalars(name)] if name in shown.Tags()["scalars"] else []


def test_standing_points_leave_out_what_was_superseded_or_abandoned() -> None:
    records = [
        *(line(1, step, 1.0) for step in range(1, 8)),  # killed; saved at 4
        {"kind": "heldout", "step": 6, "source": "all", "loss": 1.0, "submission": 1, "attempt": 1},
        *(line(2, step, 2.0) for step in (5, 6, 9)),
        {"kind": "save", "step": 9, "submission": 2, "attempt": 1},
    ]
    found = [(r["step"], r["loss"]) for r in standing(records, 9, {}) if r["kind"] == "train"]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0), (9, 2.0)]
    assert not [r for r in standing(records, 9, {}) if r["kind"] == "heldout"]
    assert [r["step"] for r in standing(records, 5, {})] == [1, 2, 3, 4, 5]


def test_points_of_a_lost_branch_go_though_they_were_logged_more_often_than_what_came_after() -> None:
    records = [*(line(1, step, 1.0) for step in range(1, 9)), line(2, 8, 2.0)]
    begun = begun_steps([{"submission": 1, "attempt": 1, "from_step": 0}, {"submission": 2, "attempt": 1}])
    assert begun == {(1, 1): 0}
    assert [r["step"] for r in standing(records, 8, begun)] == list(range(1, 9))
    begun = begun_steps([{"submission": 2, "attempt": 1, "from_step": 4}])
    assert [(r["step"], r["loss"]) for r in standing(records, 8, begun)] == [*((s, 1.0) for s in range(1, 5)), (8, 2.0)]


def test_tensorboard_shows_one_curve_over_submissions_and_no_point_twice(tmp_path: Path) -> None:
    for submission, from_step, steps in ((1, 0, range(1, 8)), (2, 4, range(5, 10)), (3, 9, range(10, 12))):
        log = RunLog(tmp_path, Attempt(submission=submission, attempt=1))
        log.show(open_mirror("tensorboard", tmp_path, "run", from_step))
        for step in steps:
            log.train({"step": step, "loss": float(submission), "mfu": None})
        log.close()
    expected = [(s, 1.0) for s in range(1, 5)] + [(s, 2.0) for s in range(5, 10)] + [(10, 3.0), (11, 3.0)]
    assert curve(tmp_path / "tensorboard", "train/loss") == expected
    assert curve(tmp_path / "tensorboard", "train/mfu") == []


def test_tensorboard_turned_on_late_shows_what_was_before(tmp_path: Path) -> None:
    for record in (line(1, 1, 3.0), line(1, 2, None), line(1, 3, 2.0), line(1, 4, 9.0)):
        append_jsonl(tmp_path / "metrics.jsonl", record)
    append_jsonl(
        tmp_path / "metrics.jsonl",
        {"kind": "heldout", "step": 3, "source": "all", "bits_per_byte": 1.5, "loss_stderr": None},
    )
    open_mirror("tensorboard", tmp_path, "run", 3).close()
    assert curve(tmp_path / "tensorboard", "train/loss") == [(1, 3.0), (3, 2.0)]
    assert curve(tmp_path / "tensorboard", "heldout_all/bits_per_byte") == [(3, 1.5)]


def test_mirror_without_its_package_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install wandb, or set mirror = \"\""):
        require_package("wandb")


def test_mirror_that_fails_is_given_up_and_the_metrics_go_on(tmp_path: Path, capsys) -> None:
    class Broken:
        def add(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("the disk of the mirror is full")

        def close(self) -> None:
            raise AssertionError("given up before")

    log = RunLog(tmp_path, Attempt(submission=1, attempt=1))
    log.show(Broken())
    for step in (1, 2):
        log.train({"step": step, "loss": 1.0})
    log.close()
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert capsys.readouterr().err.count("the disk of the mirror is full") == 1


SUBMISSION = """
import sys
from pathlib import Path
from model.metrics import Attempt, RunLog
from model.mirror import open_mirror
folder, kind, number, first, last = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
log = RunLog(folder, Attempt(submission=number, attempt=1))
log.show(open_mirror(kind, folder, "run", first - 1))
for step in range(first, last + 1):
    log.train({"step": step, "loss": float(number)})
log.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_other_mirrors_hold_one_curve_in_the_runs_folder(tmp_path: Path, kind: str) -> None:
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is an optional package, not installed here")
    for slice_of_the_run in ((1, 1, 7), (2, 5, 9)):
        done = subprocess.run(
            [sys.executable, "-c", SUBMISSION, str(tmp_path), kind, *map(str, slice_of_the_run)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "given up" not in done.stderr
    if kind == "wandb":
        assert len(list((tmp_path / "wandb").rglob("*.wandb"))) == 1
        return
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    points = {step: json.loads(metrics)["train/loss"] for step, metrics in rows}
    assert len(points) == len(rows)
    assert points == {**dict.fromkeys(range(1, 5), 1.0), **dict.fromkeys(range(5, 10), 2.0)}


def test_submission_keeps_its_packages_and_its_mirror(tiny) -> None:
    tiny.config_path.write_text(tiny.config_path.read_text() + 'mirror = "tensorboard"\n')
    outputs = [tiny.start(1, "--until-step", "6").communicate()[0], tiny.start(2).communicate()[0]]
    for number, output in enumerate(outputs, start=1):
        kept = json.loads((tiny.run_dir / "environments" / f"{number:02d}-a1.json").read_text())
        assert kept["packages"]["torch"].startswith("2."), output
        assert kept["host"]
        assert kept["gpus"] == []
    logged = [(r["step"], r["loss"]) for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert curve(tiny.run_dir / "tensorboard", "train/loss") == [(s, pytest.approx(loss)) for s, loss in logged]
    assert len(logged) == 12
