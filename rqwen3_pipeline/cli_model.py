"""What is done with a model: `rqwen3 export`, `eval`, `generate`, `trace`."""

from pathlib import Path
from typing import Any

import click

from rqwen3_pipeline.cli_common import FILE, FOLDER, settings_of


@click.command()
@click.option("--step", required=True, type=click.IntRange(1), help="Optimiser step, from 1.")
@click.option("--sequence", type=click.IntRange(0), help="Sequence within the step, from 0.")
@click.option("--loss", is_flag=True, help="All documents of the step with their losses, the highest first.")
@click.option("--checkpoint", type=FILE, help="Compute the losses with these weights. [the nearest of the run]")
@click.pass_context
def trace(ctx: click.Context, step: int, sequence: int | None, loss: bool, checkpoint: Path | None) -> None:
    """The documents that a training sequence, or with --loss a whole step, was read from."""
    import dataclasses
    import json

    if loss:
        from rqwen3_pipeline.loss_view import documents_by_loss, table

        used, found = documents_by_loss(settings_of(ctx), step, checkpoint)
        click.echo(f"step {step:,}, losses under {used}", err=True)
        click.echo(table(found if sequence is None else [one for one in found if one.sequence == sequence]))
        return
    if sequence is None:
        raise click.UsageError("Give --sequence N, or --loss for all sequences of the step.")

    from model.shard_format import read_manifest
    from rqwen3_pipeline.corpus.trace import trace as trace_sequence

    settings = settings_of(ctx)
    root = settings.root
    for document in trace_sequence(root, read_manifest(root.manifest), settings.run_config.training, step, sequence):
        click.echo(json.dumps(dataclasses.asdict(document)))


@click.command()
@click.option("--checkpoint", type=FILE, help="A .pt file with its sidecar. [the run's final, else newest]")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--out", type=FOLDER, help="The folder to write. [exports/ in the run root]")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json. [the run root's]")
@click.option("--gguf", type=click.Choice(["f32", "f16", "bf16", "q8_0"]), help="A GGUF file too, of this type.")
@click.option("--force", is_flag=True, help="Replace the folder if it exists.")
@click.pass_context
def export(ctx: click.Context, checkpoint: Path | None, dtype: str, out: Path | None, **more: Any) -> None:
    """Write a checkpoint as a Hugging Face folder, read it back and compare."""
    from rqwen3_pipeline.result_commands import export_checkpoint

    ctx.exit(
        export_checkpoint(settings_of(ctx), checkpoint, dtype, out, more["tokenizer"], more["gguf"], more["force"])
    )


@click.command("eval")
@click.option("--checkpoint", type=FILE, help="A .pt file with its sidecar. [the run's final, else newest]")
@click.option("--weights", type=FOLDER, help="A published folder or an export, instead of a checkpoint.")
@click.option("--task", "named", multiple=True, metavar="NAME", help="Only this benchmark; may be given several times.")
@click.option("--data", type=FOLDER, help="The benchmarks' folder. [benchmarks/ in the run root]")
@click.option("--out", type=FOLDER, help="The folder of the scores. [evaluations/ in the run root]")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many questions; the scores say so.")
@click.option("--batch", type=click.IntRange(1), help="Sequences per forward pass. [8]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[auto]")
@click.option("--through", type=click.Choice(["own", "transformers"]), help="What computes --weights. [own]")
@click.option("--prefetch", "fetch_only", is_flag=True, help="Only bring the benchmarks here from the Hub.")
@click.pass_context
def evaluate(
    ctx: click.Context,
    checkpoint: Path | None,
    weights: Path | None,
    named: tuple[str, ...],
    data: Path | None,
    out: Path | None,
    fetch_only: bool,
    **options: Any,
) -> None:
    """Score a checkpoint on the benchmarks; what is scored already is not asked again."""
    from rqwen3_pipeline import result_commands

    settings = settings_of(ctx)
    if fetch_only:
        ctx.exit(result_commands.prefetch(settings, named, data))
    ctx.exit(result_commands.score(settings, checkpoint, weights, named, data, out, options))


@click.command()
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--weights", type=FOLDER, help="A published folder (Qwen3 or Llama kind). [the run's final model]")
@click.option("--new-tokens", default=60, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", default=1.0, show_default=True, help="Choose among the likeliest with this probability.")
@click.option("--seed", default=0, show_default=True)
@click.pass_context
def generate(ctx: click.Context, prompt: str, weights: Path | None, **sampling: float) -> None:
    """Continue a prompt with the run's final model (or its newest checkpoint), or with published weights."""
    from rqwen3_pipeline.result_commands import continue_prompt

    ctx.exit(continue_prompt(settings_of(ctx), weights, prompt, sampling))
