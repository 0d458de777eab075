"""Several experiments on one page: what each differs in, their curves, and what came out.

Reads each experiment's configuration, logs and scores, in this run root and in those of variations
whose corpus differs. Costs what reading those files costs.
"""

from collections.abc import Mapping
from typing import Any

from model.config import RunConfig, load_run_config
from model.errors import ConfigError
from model.files import read_json, write_json, write_text
from rqwen3_pipeline.evidence.charts import COLOURS, LineChart, Series, line_chart
from rqwen3_pipeline.evidence.curves import of_source, thin
from rqwen3_pipeline.evidence.readings import Reader, finite, jsonable
from rqwen3_pipeline.evidence.report import templates
from rqwen3_pipeline.evidence.scores import evaluation_evidence
from rqwen3_pipeline.evidence.training import Logs, read_logs
from rqwen3_pipeline.settings import RunRoot

FOLDER = "_comparison"
"""Below `evidence/`; no experiment may have this name."""
CURVE_POINTS = 800


def places(root: RunRoot, first: str) -> dict[str, RunRoot]:
    """The run root of each experiment that has a configuration, `first` before the others by name."""
    elsewhere: Mapping[str, str] = {}
    if root.variations.exists():
        elsewhere = read_json(root.variations)
    found = {path.parent.name: root for path in root.path.glob("experiments/*/config.toml")}
    for name, place in elsewhere.items():
        if ((there := RunRoot((root.path / place).resolve())).experiment(name) / "config.toml").is_file():
            found[name] = there
    return {name: found[name] for name in sorted(found, key=lambda name: (name != first, name))}


def write_comparison(root: RunRoot, first: str) -> dict[str, Any]:
    """Write `evidence/_comparison/{index.html, comparison.json}`.

    Args:
        root: the run root.
        first: the experiment that the others are compared with.

    Returns:
        `page` and `comparison`, the files' paths below the run root; and `experiments`, a row each.

    Raises:
        ConfigError: no experiment has begun yet.
    """
    logs: dict[str, Logs] = {}
    rows: list[dict[str, Any]] = []
    base: RunConfig | None = None
    for name, place in places(root, first).items():
        run, reader = load_run_config(place.experiment(name) / "config.toml"), Reader(root=place.path)
        base = base or run
        logs[name] = read_logs(reader, place.experiment(name))
        rows.append(_row(name, run, base, logs[name], evaluation_evidence(reader, place, name)))
    if not rows:
        raise ConfigError(f"{root.path}: no experiment has begun there. The next step is in: rqwen3 status")
    folder = root.path / "evidence" / FOLDER
    write_json(folder / "comparison.json", {"experiments": jsonable(rows)})
    write_text(folder / "index.html", _page(rows, logs))
    names = {"page": "index.html", "comparison": "comparison.json"}
    return {key: (folder / name).relative_to(root.path).as_posix() for key, name in names.items()} | {
        "experiments": rows
    }


def differences(base: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Keys in which a configuration differs from another, as `section.key = value`; the name is no difference."""
    found: list[str] = []
    for key in sorted({*base, *other}):
        here, before, after = f"{path}{key}", base.get(key), other.get(key)
        if here == "run.name" or before == after:
            continue
        if isinstance(after, dict) and isinstance(before, dict):
            found += differences(before, after, f"{here}.")
        else:
            found.append(f"{here} = {after!r}" if key in other else f"without {here}")
    return found


def _row(name: str, run: RunConfig, base: RunConfig, logs: Logs, scores: dict[str, Any] | None) -> dict[str, Any]:
    losses, held = logs.train.losses(), of_source(logs.heldout, "all").points
    bits = {
        source: finite(of_source(logs.heldout, source).points[-1].get("bits_per_byte"))
        for source in logs.heldout_sources()
    }
    return {
        "name": name,
        "differs": differences(base.sections, run.sections),
        "steps": int(losses[-1][0]) if losses else None,
        "loss": finite(losses[-1][1]) if losses else None,
        "heldout_loss": finite(held[-1].get("loss")) if held else None,
        "heldout_stderr": finite(held[-1].get("loss_stderr")) if held else None,
        "bits_per_byte": bits,
        "scores": {
            f"{row['task']}, {row['metric']}": {"score": row["score"], "stderr": row["stderr"]}
            for row in (scores or {}).get("scores", [])
        },
    }


def _page(rows: list[dict[str, Any]], logs: Mapping[str, Logs]) -> str:
    shown = list(logs.items())[:COLOURS]
    loss = [Series(name=name, points=thin(log.train.losses(), CURVE_POINTS)) for name, log in shown]
    bits = [
        Series(name=name, points=of_source(log.heldout, "all").values("bits_per_byte"), dots=True)
        for name, log in shown
    ]
    charts = {
        "loss": _chart("loss", "Training loss", "nats per token", loss),
        "bits": _chart("bits", "Held-out bits per byte, all sources", "bits per byte", bits),
    }
    page = templates().get_template("comparison.html.j2")
    return page.render(
        rows=rows,
        charts=charts,
        sources=list(dict.fromkeys(source for row in rows for source in row["bits_per_byte"])),
        scores=list(dict.fromkeys(task for row in rows for task in row["scores"])),
    )


def _chart(key: str, title: str, y_label: str, series: list[Series]) -> Any:
    text = f"{title} of {', '.join(item.name for item in series)} by step."
    return line_chart(LineChart(key=key, title=title, description=text, x_label="step", y_label=y_label, series=series))
