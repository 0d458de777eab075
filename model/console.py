"""What the trainer says on its console: plain whole lines, flushed at once, so that a log survives SIGKILL.

Also the speed that a line reports, over the current log interval and over the whole submission.
"""

from typing import Any

from model.config import RunConfig
from model.distributed import first_process
from model.memory import plan_memory
from model.session import StepResult, TrainSession


def say(line: str) -> None:
    """One plain line on the console, at once; of several processes only the first speaks."""
    if first_process():
        print(line, flush=True)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def heldout_line(step: int, total: dict[str, Any]) -> str:
    """Held-out loss and bits per byte over all sources, each with its standard error by document."""
    loss, bits = (
        f"{total[name]:.4f}" + ("" if total[f"{name}_stderr"] is None else f" ± {total[f'{name}_stderr']:.4f}")
        for name in ("loss", "bits_per_byte")
    )
    return f"held-out at step {step:,}: loss {loss}, {bits} bits per byte ({total['documents']:,} documents)"


def introduce(run: RunConfig, session: TrainSession, threads: int) -> None:
    """Say what is about to be trained, on what, and how much it needs."""
    config, total = run.training, len(session.windows)
    epochs = config.max_steps * config.sequences_per_step / total
    plan = plan_memory(run.model, config, cuda=session.device.type == "cuda")
    say(
        f"{run.name}: {run.model.parameters():,} parameters; {config.max_steps:,} steps of {config.tokens_per_step:,} "
        f"tokens; {total:,} windows, read {epochs:.2f} times; {session.device.type}, {threads} threads; "
        f"estimated peak {plan.peak_gib:.2f} GiB, checkpoint {plan.checkpoint_bytes / 2**20:,.1f} MiB"
    )


class Pace:
    """Speed over the current log interval, and over the whole submission."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self.begin_interval()

    def begin_interval(self) -> None:
        """Forget the interval's figures."""
        self.interval_tokens, self.interval_s, self.data_wait_s = 0, 0.0, 0.0

    def add(self, tokens: int, result: StepResult) -> None:
        """Count one step."""
        self.steps, self.seconds = self.steps + 1, self.seconds + result.seconds
        self.interval_tokens += tokens
        self.interval_s += result.seconds
        self.data_wait_s += result.data_wait_s

    def tokens_per_s(self) -> float:
        """Target tokens per second of the interval."""
        return self.interval_tokens / max(self.interval_s, 1e-9)

    def mean_step_s(self) -> float:
        """Mean seconds of a step in this submission."""
        return self.seconds / max(self.steps, 1)
