"""Write the evidence report: one self-contained page, the same as JSON, and the loss curve as CSV.

The page needs no script and loads nothing: style and charts are inside. It can be mailed, printed,
and read in a terminal browser. Costs what `collect` costs.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from model.config import RunConfig
from model.files import write_json, write_text
from rqwen3_pipeline.commands import commands
from rqwen3_pipeline.evidence.charts import BarChart, LineChart, Series, bar_chart, line_chart
from rqwen3_pipeline.evidence.collect import collect
from rqwen3_pipeline.evidence.curves import loss_csv, of_source
from rqwen3_pipeline.evidence.readings import Reader, finite
from rqwen3_pipeline.evidence.receipts import MAIN_PACKAGES
from rqwen3_pipeline.evidence.training import Logs, read_logs
from rqwen3_pipeline.evidence.words import NOTHING, between, dash, duration, magnitude, percent, quantity, size
from rqwen3_pipeline.settings import RunRoot

TEMPLATE = "report.html.j2"
SHOWN_SAMPLES = 6
ZOOM_POINTS = 30
"""Logged lines after the first tenth from which a second, closer view of the loss is worth it."""


def write_report(root: RunRoot, run: RunConfig) -> dict[str, Any]:
    """Write `evidence/<name>/{index.html, evidence.json, loss.csv}`, each whole or not at all.

    Returns:
        `page`, `evidence`, `loss_csv`: their paths below the run root; `headline`, `verdict`;
        `checks` {holds, does_not_hold, pending: how many}; `failed`: what does not hold, in words;
        `missing`: what is not there yet, with the command that makes it.
    """
    logs = read_logs(Reader(root=root.path), root.experiment(run.name))
    evidence = collect(root, run, logs)
    folder = root.evidence(run.name)
    write_text(folder / "loss.csv", loss_csv(logs.train, of_source(logs.heldout, "all")))
    write_json(folder / "evidence.json", evidence)
    write_text(folder / "index.html", render_page(evidence, logs, run))
    checks = evidence["checks"]
    names = {"page": "index.html", "evidence": "evidence.json", "loss_csv": "loss.csv"}
    return {
        **{key: (folder / name).relative_to(root.path).as_posix() for key, name in names.items()},
        "headline": evidence["headline"],
        "verdict": evidence["verdict"],
        "checks": {
            "holds": sum(check["holds"] is True for check in checks),
            "does_not_hold": sum(check["holds"] is False for check in checks),
            "pending": sum(check["holds"] is None for check in checks),
        },
        "failed": [f"{check['says']} {check['seen']}" for check in checks if check["holds"] is False],
        "missing": evidence["missing"],
    }


def templates() -> Environment:
    """The pages' templates, with the filters that write figures."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "quantity": quantity,
        "dash": dash,
        "between": between,
        "percent": percent,
        "size": size,
        "duration": duration,
        "magnitude": magnitude,
    }
    return environment


def render_page(evidence: dict[str, Any], logs: Logs, run: RunConfig) -> str:
    """The page, from what `collect` returned and the curves behind it."""
    charts = {**_training_charts(logs, run), "funnel": _funnel_chart(evidence["corpus"])}
    return (
        templates()
        .get_template(TEMPLATE)
        .render(
            e=evidence,
            charts=charts,
            shown_samples=[_split(sample) for sample in _chosen(evidence["training"]["samples"])],
            commands=commands(run),
            main_packages=MAIN_PACKAGES,
            ours=_beside_known_run(evidence),
        )
    )


def _split(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with its continuation apart from the prompt, whether or not the text repeats the prompt."""
    text, prompt = sample["text"], sample["prompt"]
    return {**sample, "continued": text.removeprefix(prompt)}


def _beside_known_run(evidence: dict[str, Any]) -> dict[str, str]:
    """This run's answer to each line about the known run."""
    training, windows = evidence["training"], evidence["windows"]
    held = next((row for row in training["heldout"] if row["source"] == "all"), None)
    final = next((r for r in evidence["receipts"]["files"] if r["what"] == "final checkpoint"), None)
    read = windows["so_far"] if windows else None
    reasons = [str(record["stop_reason"]) for record in training["ledger"]]
    logged = training["curve"]["lines"] > 0

    def value(key: str, decimals: int | None = None) -> str:
        return quantity(training[key]["value"], decimals)

    return {
        "submissions": f"{training['submissions']['value']}, ended by {', '.join(reasons)}" if reasons else NOTHING,
        "start loss": f"{value('start_loss')} (step {value('start_step')})" if logged else NOTHING,
        "end loss": f"{value('end_loss')} (perplexity {value('perplexity', 2)})" if logged else NOTHING,
        "held-out loss": f"{quantity(held['loss'])} at step {quantity(held['step'])}" if held else NOTHING,
        "windows": f"{read['unread']:,} of {windows['windows']:,} not read, {read['repeated_reads']:,} reads repeated"
        if read
        else NOTHING,
        "tokens a second": value("tokens_per_s", 0),
        "SHA-256 of the result": f"{final['sha256'][:16]}…" if final else NOTHING,
    }


def _chosen(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last and evenly spaced ones in between, at most six."""
    if len(samples) <= SHOWN_SAMPLES:
        return samples
    last = len(samples) - 1
    return [samples[round(i * last / (SHOWN_SAMPLES - 1))] for i in range(SHOWN_SAMPLES)]


def _training_charts(logs: Logs, run: RunConfig) -> dict[str, Markup]:
    """Loss, its closer view, learning rate, bits per byte and speed."""
    marks = _submission_marks(logs)
    warmup = run.training.warmup_steps
    band = (0.0, float(warmup), f"Warm-up: the first {warmup:,} steps") if warmup else None
    loss, held = logs.train.losses(), of_source(logs.heldout, "all").losses()
    series = [
        Series(name="training loss", points=loss),
        *([Series(name="held-out loss, all sources", points=held, dots=True)] if held else []),
    ]
    later = loss[-1][0] / 10 if loss else 0.0
    closer = [
        Series(name=item.name, points=[point for point in item.points if point[0] > max(later, warmup)], dots=item.dots)
        for item in series
    ]
    described = _described_loss(loss, marks, warmup)

    def draw(key: str, title: str, y_label: str, lines: list[Series], text: str, from_zero: bool = False) -> Markup:
        return line_chart(
            LineChart(
                key=key,
                title=title,
                description=text,
                x_label="step",
                y_label=y_label,
                series=lines,
                marks=marks,
                band=band,
                from_zero=from_zero,
            )
        )

    rates = [Series(name="learning rate", points=logs.train.values("learning_rate"))]
    sources = [
        Series(name=source, points=of_source(logs.heldout, source).values("bits_per_byte"), dots=True)
        for source in logs.heldout_sources()
    ]
    speed = [Series(name="tokens a second", points=logs.train.values("tokens_per_s"))]
    charts = {
        "loss": draw("loss", "Loss", "nats per token", series, described),
        "rate": draw("rate", "Learning rate", "learning rate", rates, "The learning rate of each logged step.", True),
        "bits": draw("bits", "Held-out bits per byte", "bits per byte", sources, "Bits per byte of held-out text."),
        "speed": draw("speed", "Speed", "tokens per second", speed, "Tokens per second of each logged step.", True),
    }
    if len(closer[0].points) >= ZOOM_POINTS:
        text = f"Without the first tenth. {described}"
        charts["closer"] = draw("closer", "Loss, closer", "nats per token", closer, text)
    return charts


def _described_loss(loss: list[tuple[float, float]], marks: list[tuple[float, str]], warmup: int) -> str:
    """The loss chart in words, for those who can't see it."""
    if not loss:
        return "No losses are logged yet."
    (first_step, first), (last_step, last) = loss[0], loss[-1]
    return (
        f"The loss goes from {quantity(first)} at step {first_step:,.0f} to {quantity(last)} at step {last_step:,.0f}. "
        f"{len(marks)} ends of submissions are marked; the first {warmup:,} steps, the warm-up, are shaded."
    )


def _submission_marks(logs: Logs) -> list[tuple[float, str]]:
    """Where each attempt ended, by what it saved."""
    marks: list[tuple[float, str]] = []
    for record in logs.ledger:
        step = finite(record.get("saved_step") if record.get("saved_step") is not None else record.get("to_step"))
        if step is not None:
            marks.append((step, f"#{record.get('submission')} {record.get('stop_reason')}"))
    return marks


def _funnel_chart(corpus: dict[str, Any]) -> Markup:
    """Where each source's rows went, as bars of 100 %."""
    reasons = list(dict.fromkeys(reason for row in corpus["sources"] for reason in row["dropped"]))
    fixed = ("read by the run", "left over by the budget", "held out", "duplicates")
    rows: list[tuple[str, list[float]]] = []
    for row in corpus["sources"]:
        documents, used = row["documents"], row["documents_used"]
        read = used if used is not None else documents
        if row["rows"] is None or documents is None or read is None:
            continue
        values = [read, documents - read, row["heldout_documents"] or 0, row["duplicates"] or 0]
        rows.append((row["source"], [float(v) for v in (*values, *(row["dropped"].get(r, 0) for r in reasons))]))
    return bar_chart(
        BarChart(
            key="funnel",
            title="Corpus funnel",
            description="For each source, the shares of its rows that were used, left over, held out, or dropped and "
            "why; the table below has the numbers.",
            x_label="share of the rows in the raw files",
            categories=[*fixed, *(f"dropped: {reason}" for reason in reasons)],
            rows=rows,
        )
    )
