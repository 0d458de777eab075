"""The run's curve in TensorBoard, Weights & Biases (offline) or trackio, as one curve over all submissions.

`metrics.jsonl` stays the truth. When a submission begins, whatever was logged after the checkpoint it
goes on from is superseded and not shown: TensorBoard's own purge hides it; the other two can't take
back a point, so their local record is written anew from the metrics. Costs a few scalars a log step.
All files lie in the run's folder; nothing is sent anywhere.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from model.attempts import begun_steps
from model.errors import EnvironmentProblem
from model.files import read_jsonl

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The package that each kind of mirror needs."""
TRAIN = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu", "memory_gib", "data_wait_s")
HELDOUT = ("loss", "loss_stderr", "bits_per_byte", "bits_per_byte_stderr")


class Mirror(Protocol):
    """Where points are shown."""

    def add(self, step: int, values: dict[str, float]) -> None:
        """Show the values of a step."""
        ...

    def close(self) -> None:
        """Write out what is not yet written."""
        ...


def require_package(kind: str) -> None:
    """Check that a mirror can work, before anything is trained.

    Raises:
        EnvironmentProblem: its package is not installed.
    """
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        raise EnvironmentProblem(
            f"training.mirror = {kind!r}: the package {PACKAGES[kind]} is not installed. Install it: "
            f'pip install {PACKAGES[kind]}, or set mirror = "": metrics.jsonl has the same figures.'
        )


def open_mirror(kind: str, run_dir: Path, name: str, from_step: int) -> Mirror:
    """Go on showing a run from a step.

    Args:
        kind: `tensorboard`, `wandb` or `trackio`.
        run_dir: the experiment's folder.
        name: the experiment.
        from_step: the step it goes on from; later points of before are hidden.

    Raises:
        EnvironmentProblem: the package is not installed.
    """
    require_package(kind)
    folder = run_dir / kind
    if kind == "tensorboard":
        shown = folder.is_dir() and any(folder.iterdir())
        mirror: Mirror = _TensorBoard(folder, from_step)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mirror, shown = (_wandb if kind == "wandb" else _trackio)(folder, name), False
    if not shown:
        begun = begun_steps(read_jsonl(run_dir / "ledger.jsonl"))
        for record in standing(read_jsonl(run_dir / "metrics.jsonl"), from_step, begun):
            if values := scalars(record):
                mirror.add(int(record["step"]), values)
    return mirror


def standing(
    records: Iterable[dict[str, Any]], from_step: int, begun: Mapping[tuple[Any, Any], int]
) -> list[dict[str, Any]]:
    """The points of a run that goes on from a step, by step: superseded and abandoned ones are left out.

    An attempt of which `begun` does not know where it went on from did so right before its first line.
    """
    points: dict[tuple[int, str, str], dict[str, Any]] = {}
    attempt: tuple[Any, Any] | None = None
    for record in records:
        seen, step = (record.get("submission"), record.get("attempt")), record.get("step")
        if not isinstance(step, int):
            continue
        if record.get("kind") == "train" and seen != attempt:  # what others logged from here on was lost
            kept = min(begun.get(seen, step), step - 1)
            attempt, points = seen, {key: point for key, point in points.items() if key[0] <= kept}
        points[step, str(record.get("kind")), str(record.get("source", ""))] = record
    return [point for key, point in sorted(points.items(), key=lambda item: item[0]) if key[0] <= from_step]


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """What of a line of `metrics.jsonl` is shown, by name; what is null is left out."""
    kind = record.get("kind")
    if kind == "train":
        prefix, names = "train", TRAIN
    elif kind == "heldout":
        prefix, names = f"heldout_{record['source']}", HELDOUT
    else:
        return {}
    return {f"{prefix}/{name}": float(record[name]) for name in names if record.get(name) is not None}


class _TensorBoard:
    def __init__(self, folder: Path, from_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=from_step + 1)

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Calls:
    """A mirror made of a library's two functions."""

    def __init__(self, log: Callable[[dict[str, float], int], Any], finish: Callable[[], Any]) -> None:
        self._log, self._finish = log, finish

    def add(self, step: int, values: dict[str, float]) -> None:
        self._log(values, step)

    def close(self) -> None:
        self._finish()


def _wandb(folder: Path, name: str) -> Mirror:
    import wandb  # pyright: ignore[reportMissingImports]

    run: Any = wandb.init(project="rqwen3", id=name, name=name, dir=str(folder), mode="offline", resume="allow")
    return _Calls(lambda values, step: run.log(values, step=step), run.finish)


def _trackio(folder: Path, name: str) -> Mirror:
    os.environ["TRACKIO_DIR"] = str(folder)  # read when it is imported
    import trackio  # pyright: ignore[reportMissingImports]

    run: Any = trackio.init(project="rqwen3", name=name, embed=False)
    return _Calls(lambda values, step: run.log(values, step=step), run.finish)
