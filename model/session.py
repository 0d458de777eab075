"""TrainSession: model, optimiser and place in the data, and one optimiser step at a time.

What a session does depends only on its configuration, its data and its step number: sample i of the
run is the same window in every job, so a resumed session continues bit for bit (on a CPU with
as many threads; on CUDA under `deterministic`). A step costs `CoreConfig.flops_per_token` FLOPs per token, forward and
backward in micro-batches, and one pass of the optimiser.
"""

import base64
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from model import phases
from model.checkpoint import SavedCheckpoint, load, load_weights, warn
from model.compiler import compile_blocks, on_trial, run_eagerly
from model.config import RunConfig
from model.distributed import SharedModel, Team, micro_batches_each, spread_moments, spread_weights, whole, whole_tensor
from model.errors import CheckpointError, ConfigError
from model.optimizer import make_optimizer
from model.rqwen3 import RQwen3
from model.schedule import learning_rate, scheduler_state
from model.windows import StepReader, TokenWindows

START_TOKENS = 64
"""Tokens over which the untrained model's logits are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimiser step did."""

    step: int
    """Its number, from 1."""
    loss: float
    """Mean cross-entropy of its tokens before the update, nats; maybe not finite."""
    learning_rate: float
    """Of this update."""
    grad_norm: float
    """Global norm before clipping; maybe not finite."""
    skipped: bool
    """Loss or gradient was not finite: the weights were left as they were."""
    seconds: float
    """Time of the step, with the wait for data."""
    data_wait_s: float
    """Time spent waiting for its tokens."""


class TrainSession:
    """A training run in memory."""

    def __init__(self, run: RunConfig, windows: TokenWindows, team: Team | None = None) -> None:
        """Build a freshly initialised model at step 0.

        Args:
            run: the configuration.
            windows: the data.
            team: the processes that train it together; by default this one alone.

        Raises:
            ConfigError: the device is not there, the tokenizer has more ids than the embedding, or the
                micro-batches can't be shared evenly.
        """
        self.run, self.config, self.windows = run, run.training, windows
        self.team = team or Team()
        self.micro_batches = micro_batches_each(self.config, self.team)
        if windows.manifest.vocab_size > run.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size = {run.model.vocab_size:,} has fewer rows than the tokenizer's "
                f"{windows.manifest.vocab_size:,} ids. Raise it."
            )
        self.device = pick_device(run.training.device)
        set_determinism(run.training.deterministic)
        torch.manual_seed(run.training.seed)
        self.model = RQwen3(run.model)
        self.model.initialise(run.training.seed)
        self.model.to(self.device).train()
        self.model.model.recompute = run.training.recompute
        wanted = run.training.compile if self.device.type == "cuda" else run.training.compile_on_cpu
        self.compiled = False
        if wanted:
            self._agree_to_compile(compile_blocks(self.model))
        self._proven = not self.compiled
        self.shared = SharedModel(self.model, self.team, run.training.parallel)
        self.optimizer = make_optimizer(self.model, run.training)
        self.step = 0
        self.loss_history: list[float] = []
        self.start_logit_std: float | None = None
        """Standard deviation of the untrained model's logits, once step 1 is made; None where that cannot be told."""
        self._reader: StepReader | None = None
        self._partial: list[torch.Tensor] = []

    @property
    def data_offset(self) -> int:
        """Position in the run's data, in target tokens."""
        return self.step * self.config.tokens_per_step

    def train_step(
        self, should_stop: Callable[[], bool] = lambda: False, waiting: Callable[[], bool] = lambda: False
    ) -> StepResult | None:
        """Make one optimiser step.

        Args:
            should_stop: asked before every micro-batch, equally often on all ranks.
            waiting: asked while the data is not there yet; not so.

        Returns:
            What it did; None if it was told to stop, in which case partial gradients are dropped
            and the session stands at the step before, its random state too.
        """
        started, random_state = time.perf_counter(), self.random_state()
        tokens_SL = self._next_tokens(waiting)
        data_wait_s = time.perf_counter() - started
        if self.step == 0 and tokens_SL is not None and (self.config.parallel == "ddp" or self.team.size == 1):
            self.start_logit_std = self._logit_std(tokens_SL[:1, :-1][:, :START_TOKENS])
        rate = learning_rate(self.step + 1, self.config)
        total = torch.zeros((), device=self.device)
        size = self.config.micro_batch_size
        for number in range(self.micro_batches):
            if should_stop() or tokens_SL is None:
                self.shared.drop_gradients()
                self.restore_random_state(random_state)  # dropout has drawn from it
                self._partial = [] if tokens_SL is None else [tokens_SL]
                return None
            micro_batch = tokens_SL[number * size : (number + 1) * size]
            phases.enter_micro_batch("micro_batch" if self._proven else "compile", self.step + 1, micro_batch)
            if not self._proven:
                self._prove_compiler(micro_batch)
            with self.shared.accumulating(last=number + 1 == self.micro_batches):
                total += self._micro_batch(micro_batch)
        phases.enter("optimizer_step", self.step + 1)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        loss, grad_norm, skipped = self._update(total, norm, rate)
        self.step += 1
        self.loss_history.append(loss)
        phases.enter("step_done", self.step)
        return StepResult(
            step=self.step,
            loss=loss,
            learning_rate=rate,
            grad_norm=grad_norm,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            data_wait_s=data_wait_s,
        )

    def _logit_std(self, ids_BT: torch.Tensor) -> float:
        """Standard deviation of all logits of a few tokens; draws nothing, and compiles nothing."""
        self.model.eval()
        with torch.no_grad(), self.autocast():
            logits_BTV = self.model(ids_BT.to(self.device), self.model.new_caches(*ids_BT.shape))
        self.model.train()
        return float(logits_BTV.float().std(correction=0))

    def _update(self, total: torch.Tensor, norm: torch.Tensor, rate: float) -> tuple[float, float, bool]:
        """Move the weights, unless loss or gradient is not finite; returns loss, norm, and whether it did not."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.team.size == 1:
            # The fused kernel itself leaves everything as it is where this is 1: the only wait for the
            # device comes when the whole step is under way.
            self.optimizer.found_inf = (~torch.isfinite(total + norm)).float()  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
            loss, grad_norm = float(total), float(norm)
            skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        else:  # all processes must agree before any of them moves
            loss = float(self.team.sum(total.double().cpu())) / self.team.size
            grad_norm = float(whole_tensor(norm))
            skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
            if not skipped:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm, skipped

    def _micro_batch(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Add a micro-batch's gradient; returns its part of the step's loss, times the number of ranks.

        That factor is there because the ranks' gradients are averaged, and what is wanted is their sum.
        """
        return self._add_gradient(tokens_BL.to(self.device, non_blocking=True))

    def _add_gradient(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            loss = self.shared.loss(tokens_BL[:, :-1], tokens_BL[:, 1:], self.config.tokens_per_step // self.team.size)
        loss.backward()
        return loss.detach()

    def _prove_compiler(self, tokens_BL: torch.Tensor) -> None:
        """Compile by a first pass, thrown away, in which the ranks exchange no gradient."""
        random_state = self.random_state()
        with self.shared.accumulating(last=False), on_trial(self.model) as failures:
            self._add_gradient(tokens_BL.to(self.device))
        self.shared.drop_gradients()
        self.restore_random_state(random_state)
        self._agree_to_compile(failures[0] if failures else None)
        self._proven = True

    def _agree_to_compile(self, failure: str | None) -> None:
        """Where the compiler failed on any rank, let all go on without one, aloud."""
        if failure is not None and self.team.size > 1:
            failure = f"rank {self.team.rank}: {failure}"
        failure = self.team.agree(failure)
        self.compiled = failure is None
        if failure is not None:
            run_eagerly(self.model)
            warn(f"the blocks are not compiled ({failure}); training is slower, and its bits differ.")

    def autocast(self) -> torch.autocast:
        """bf16 matrix products on CUDA, plain fp32 on a CPU."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def _next_tokens(self, waiting: Callable[[], bool] = lambda: False) -> torch.Tensor | None:
        if self._partial:
            return self._partial.pop()
        if self._reader is None:
            self._reader = StepReader(
                self.windows,
                self.data_offset // self.config.seq_len,
                self.config.sequences_per_step,
                self.config.seed,
                share=(self.team.rank, self.team.size),
                pinned=self.device.type == "cuda",
            )
        return self._reader.next(waiting)

    def reset(self) -> None:
        """Go back to step 0 as freshly built: the seed's weights, no moments, no gradients, no history."""
        self.close()
        self._partial = []
        self.step, self.loss_history = 0, []
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.shared.initialise(self.config.seed)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: its six entries, not copied; on the first rank alone, and all must ask."""
        return {
            "step": self.step,
            "model_state_dict": whole(dict(self.model.state_dict()), self.team),
            "optimizer_state_dict": whole(self.optimizer.state_dict(), self.team),
            "scheduler_state_dict": scheduler_state(self.step, self.config),
            "loss_history": list(self.loss_history),
            "data_offset": self.data_offset,
        }

    def sidecar(self) -> dict[str, Any]:
        """What a checkpoint's sidecar says of the session; each rank's own random state."""
        return {
            "config": self.run.resolved(),
            "data_fingerprint": self.windows.manifest.sha256,
            "rng": self.random_state(),
            "compiled": self.compiled,
        }

    def random_state(self) -> dict[str, str | None]:
        """State of the random generators, base64, for the sidecar."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {"cpu": _encode(torch.get_rng_state()), "cuda": None if cuda is None else _encode(cuda)}

    def restore(self, saved: SavedCheckpoint, *, other_data: bool = False) -> None:
        """Continue from a checkpoint.

        Args:
            saved: the checkpoint.
            other_data: accept one that was trained on another manifest, aloud.

        Raises:
            CheckpointError: it does not fit the configuration or the data.
        """
        seen, mine = saved.sidecar.get("data_fingerprint"), self.windows.manifest.sha256
        if seen != mine:
            told = f"{saved.path}: was trained on the manifest {str(seen)[:12]}…, this one is {mine[:12]}…."
            if not other_data:
                raise CheckpointError(
                    f"{told} Give the manifest it was trained on, or another run.name for a new experiment, or go on "
                    "with other data on purpose: --accept-other-data"
                )
            warn(f"{told} Going on with it as told: windows may be repeated or missed.")
        state = load(saved.path)
        load_weights(self.model, spread_weights(state["model_state_dict"], self.model), str(saved.path))
        self.optimizer.load_state_dict(spread_moments(state["optimizer_state_dict"], self.optimizer))
        self.step, self.loss_history = int(state["step"]), list(state["loss_history"])
        if state["data_offset"] != self.data_offset:
            raise CheckpointError(
                f"{saved.path}: stands at token {state['data_offset']:,} of the data, but step {self.step:,} of this "
                f"configuration is token {self.data_offset:,}. Use the configuration beside the checkpoint."
            )
        self.restore_random_state(saved.sidecar.get("rng") or {})
        if saved.sidecar.get("compiled", self.compiled) != self.compiled:
            warn(
                f"{saved.path} was trained {'with' if not self.compiled else 'without'} compiled blocks, and this "
                f"goes on {'with' if self.compiled else 'without'} them: the bits differ from those of one run."
            )
        self.close()
        self._partial = []

    def restore_random_state(self, rng: dict[str, str | None]) -> None:
        """Put back what `random_state` gave."""
        if rng.get("cpu"):
            torch.set_rng_state(_decode(str(rng["cpu"])))
        if rng.get("cuda") and self.device.type == "cuda":
            torch.cuda.set_rng_state(_decode(str(rng["cuda"])), self.device)


def pick_device(name: str) -> torch.device:
    """The device of a configuration's `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("training.device = 'cuda', but PyTorch sees no CUDA device here. Use a GPU job, or 'auto'.")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def set_determinism(wanted: bool) -> None:
    """Ask for the same bits in every run on CUDA; TF32 is allowed for what fp32 products remain."""
    torch.backends.cuda.matmul.allow_tf32 = not wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def set_threads() -> int:
    """Use as many threads as this process may run on, or as SLURM gave the task; returns them.

    Processes that torchrun started on this machine share them.
    """
    allowed = len(os.sched_getaffinity(0))
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    threads = min(allowed, int(granted)) if granted.isdigit() and int(granted) > 0 else allowed
    threads = max(1, threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
