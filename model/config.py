"""Configuration: one TOML file describes a run whole; here are the parts the trainer reads.

`[run]` names the experiment and its seed, `[model]` is a `CoreConfig`, `[training]` a `TrainConfig`.
The sections `[data]`, `[submissions]` and `[evaluation]` belong to the pipeline, which parses them
with the same `build`; here they are carried along untouched, so that the copy saved beside every
checkpoint says everything. A misspelt key is refused with the list of the valid ones.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config_build import LINE, T, build, read_toml, unknown_names, unwritable
from model.errors import ConfigError

SECTIONS = ("run", "data", "model", "training", "submissions", "evaluation")
"""Between the problems of one message."""
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreConfig:
    """The shape of the model, every field as the Qwen3 world spells it."""

    vocab_size: int
    """Rows of the embedding; at least the tokenizer's number of ids."""
    d_model: int
    """Width of the residual stream."""
    n_layer: int
    """Number of blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides `num_heads`."""
    head_dim: int
    """Width of one head, even; `num_heads * head_dim` need not equal `d_model`."""
    intermediate_size: int
    """Inner width of the SwiGLU feed-forward."""
    max_seq_len: int
    """Longest sequence the rotary tables are built for, in tokens."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before the root."""
    qk_norm: bool = True
    """RMSNorm over each query and key head before the rotation, as Qwen3 has and Llama has not."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    dropout: float = 0.0
    """Share of activations dropped after attention and feed-forward while training."""
    num_experts: int = 0
    """Experts of a sparse block's feed-forward; 0 makes every block dense."""
    num_experts_per_tok: int = 2
    """Experts that each token goes through."""
    moe_intermediate_size: int = 0
    """Inner width of one expert."""
    decoder_sparse_step: int = 2
    """Every so many blocks one is sparse: with 2, the second, the fourth, …"""
    router_aux_loss_coef: float = 0.001
    """Weight of the loss that keeps the experts evenly used."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "n_layer", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_seq_len"):
            _require(getattr(self, name) >= 1, f"model.{name} = {getattr(self, name)} must be at least 1")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"model.head_dim = {self.head_dim} must be even for the rotary embedding")
        _require(0.0 <= self.dropout < 1.0, f"model.dropout = {self.dropout} must lie in [0, 1)")
        _require(self.rope_theta > 1.0, f"model.rope_theta = {self.rope_theta} must be above 1")
        _require(self.rms_norm_eps > 0.0, f"model.rms_norm_eps = {self.rms_norm_eps} must be above 0")
        _require(self.num_experts >= 0, f"model.num_experts = {self.num_experts} must not be negative")
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        for name in ("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"):
            _require(getattr(self, name) >= 1, f"model.{name} = {getattr(self, name)} must be at least 1 with experts")
        _require(
            self.num_experts_per_tok <= self.num_experts,
            f"model.num_experts_per_tok = {self.num_experts_per_tok} exceeds model.num_experts = {self.num_experts}",
        )
        _require(
            self.router_aux_loss_coef >= 0.0,
            f"model.router_aux_loss_coef = {self.router_aux_loss_coef} must not be negative",
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether block number `layer`, from 0, has a mixture of experts."""
        return self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def sparse_layers(self) -> int:
        """Number of blocks with a mixture of experts."""
        return sum(self.is_sparse(layer) for layer in range(self.n_layer))

    def attention_parameters(self) -> int:
        """Matrices of one block's attention."""
        return self.d_model * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    def norm_parameters(self) -> int:
        """Norm weights of one block."""
        return 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)

    def feed_forward_parameters(self, *, sparse: bool = False, active: bool = False) -> int:
        """Matrices of one block's feed-forward.

        Args:
            sparse: of a block with experts: those, and the router.
            active: only what one token goes through.
        """
        if not sparse:
            return 3 * self.d_model * self.intermediate_size
        experts = self.num_experts_per_tok if active else self.num_experts
        return 3 * self.d_model * self.moe_intermediate_size * experts + self.d_model * self.num_experts

    def block_parameters(self, *, sparse: bool = False, active: bool = False) -> int:
        """Parameters of one block: attention, feed-forward and norms."""
        feed_forward = self.feed_forward_parameters(sparse=sparse, active=active)
        return self.attention_parameters() + feed_forward + self.norm_parameters()

    def parameters(self, *, active: bool = False) -> int:
        """All parameters of the model, or those one token goes through; a tied head counts once."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        sparse = self.sparse_layers
        blocks = (self.n_layer - sparse) * self.block_parameters()
        blocks += sparse * self.block_parameters(sparse=True, active=active)
        return embeddings + blocks + self.d_model

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs per token: 6·(N − embedding) + 12·L·H·hd·T.

        The convention of nanochat's `estimate_flops` and torchtitan's
        `get_dense_model_nparams_and_flops`; attention is counted in full, recomputation is not.
        """
        matmul_parameters = self.parameters(active=True) - (
            0 if self.tie_embeddings else self.vocab_size * self.d_model
        )
        return 6 * matmul_parameters + 12 * self.n_layer * self.num_heads * self.head_dim * seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained. Units are in the names."""

    max_steps: int
    """Optimiser steps of the whole run, over all its submissions."""
    seq_len: int
    """Tokens of context per sequence; a window holds one more."""
    micro_batch_size: int
    """Sequences per forward pass."""
    accumulation: int = 1
    """Micro-batches per optimiser step, over all processes together: a multiple of their number."""
    seed: int = 1234
    """Initialisation, and the order of the windows."""
    learning_rate: float = 3e-4
    """Peak, reached at the end of the warm-up."""
    min_learning_rate: float = 3e-5
    """Where the cosine ends, at `max_steps`."""
    warmup_steps: int = 500
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.999
    """AdamW's second-moment decay."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """On tensors of two or more dimensions whose name has no "norm"."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    log_every_steps: int = 10
    """Steps between metrics lines; the first and the last step are always logged."""
    save_every_steps: int = 1000
    """Steps between checkpoints."""
    save_every_minutes: float = 0.0
    """Save as well when this long has passed since the last save, for slices shorter than those steps; 0 is never."""
    keep_last: int = 3
    """Newest checkpoints kept."""
    keep_every_steps: int = 5000
    """Checkpoints at multiples of this stay for good."""
    keep_first_step: int = 1000
    """This checkpoint stays for good too."""
    eval_every_steps: int = 1000
    """Steps between held-out evaluations; also at the first and the last step."""
    eval_max_tokens: int = 200_000
    """Most held-out tokens read per source and evaluation: whole documents, or the beginning of a longer first one."""
    sample_every_steps: int = 500
    """Steps between samples from the fixed prompt; also before the first and after the last step."""
    sample_prompt: str = "The theory of general relativity"
    """The prompt of the samples."""
    sample_new_tokens: int = 60
    """Greedy tokens per sample."""
    background_save: bool = True
    """Go on training while a checkpoint is written, from a copy of the state in main memory, where that has room."""
    dry_step: bool = True
    """Begin on hardware that this run has not seen with a step, an evaluation and a save at full shape, thrown away."""
    lead_s: float = 300.0
    """Seconds before the deadline at which the trainer begins to save, at most a third of the limit."""
    mirror: str = ""
    """Where the curve is shown beside `metrics.jsonl`: `tensorboard`, `wandb` (offline) or `trackio`, each a package
    to install, or nowhere."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    parallel: str = "ddp"
    """How several processes share the run: `ddp`, the whole model on each; `fsdp`, weights and moments spread over all,
    for a model that does not fit one GPU (its weights alone, 4 bytes a parameter, still must, for samples)."""
    compile: bool = True
    """Compile each block; on CUDA only."""
    compile_on_cpu: bool = False
    """Compile on a CPU too, which needs a C++ compiler; the bits differ from those of a run without."""
    deterministic: bool = False
    """Ask CUDA for the same bits in every run, at some cost in speed."""
    recompute: bool = False
    """Keep only each block's input, and make the rest again in the backward pass: less memory, a quarter more work."""

    def __post_init__(self) -> None:
        sizes = ("max_steps", "seq_len", "micro_batch_size", "accumulation", "keep_last", "sample_new_tokens")
        rates = ("learning_rate", "adam_eps")
        cadences = ("log_every_steps", "save_every_steps", "eval_every_steps", "sample_every_steps", "keep_every_steps")
        for name in (*sizes, *rates, *cadences, "eval_max_tokens"):
            _require(getattr(self, name) > 0, f"training.{name} = {getattr(self, name)} must be above 0")
        for name in (
            "warmup_steps",
            "min_learning_rate",
            "weight_decay",
            "grad_clip",
            "lead_s",
            "keep_first_step",
            "seed",
            "save_every_minutes",
        ):
            _require(getattr(self, name) >= 0, f"training.{name} = {getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            _require(0.0 <= getattr(self, name) < 1.0, f"training.{name} = {getattr(self, name)} must lie in [0, 1)")
        _require(
            self.min_learning_rate <= self.learning_rate,
            f"training.min_learning_rate = {self.min_learning_rate} is above "
            f"training.learning_rate = {self.learning_rate}",
        )
        _require(
            self.warmup_steps < self.max_steps,
            f"training.warmup_steps = {self.warmup_steps} must be below training.max_steps = {self.max_steps}",
        )
        _require(
            self.device in ("auto", "cpu", "cuda"), f"training.device = {self.device!r} is none of auto, cpu, cuda"
        )
        mirrors = ("", "tensorboard", "wandb", "trackio")
        _require(
            self.mirror in mirrors, f"training.mirror = {self.mirror!r} is none of {', '.join(map(repr, mirrors))}"
        )
        _require(self.parallel in ("ddp", "fsdp"), f"training.parallel = {self.parallel!r} is none of ddp, fsdp")

    @property
    def sequences_per_step(self) -> int:
        """Windows that one optimiser step consumes."""
        return self.micro_batch_size * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one optimiser step."""
        return self.sequences_per_step * self.seq_len

    @property
    def max_grad_norm(self) -> float:
        """Norm that gradients are clipped to; infinite where clipping is off."""
        return self.grad_clip or math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One configuration file, parsed as far as the trainer needs it."""

    name: str
    """The experiment's name, which its folders carry."""
    model: CoreConfig
    """Shape of the model."""
    training: TrainConfig
    """How it is trained."""
    sections: dict[str, Any] = field(default_factory=dict[str, Any])
    """The whole file as read, section by section."""
    path: Path | None = field(default=None, compare=False)
    """The file, for messages."""

    def __post_init__(self) -> None:
        _require(
            NAME_PATTERN.fullmatch(self.name) is not None,
            f"run.name = {self.name!r} must be 1 to 64 of a-z, 0-9, - and _, and begin with a letter or digit",
        )
        _require(
            self.training.seq_len <= self.model.max_seq_len,
            f"training.seq_len = {self.training.seq_len} exceeds model.max_seq_len = {self.model.max_seq_len}",
        )

    def resolved(self) -> dict[str, Any]:
        """Every value in force, the defaults too, section by section."""
        known = {"model": dataclasses.asdict(self.model), "training": dataclasses.asdict(self.training)}
        return {**self.sections, **known}


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunSection:
    name: str
    """The experiment's name."""


def load_run_config(path: Path) -> RunConfig:
    """Read a run's TOML file.

    Raises:
        ConfigError: the file is missing or no TOML, or sections, keys or values are not usable; the
            message names them all, and the valid ones.
    """
    sections = read_toml(path)
    problems: list[str] = []
    if unknown := [name for name in sections if name not in SECTIONS]:
        problems.append(unknown_names("section", unknown, SECTIONS))
    parts: list[Any] = []
    own = {"run": _RunSection, "model": CoreConfig, "training": TrainConfig}
    problems += unwritable({name: values for name, values in sections.items() if name not in own}, "")
    for name, cls in own.items():
        try:
            parts.append(build(cls, sections.get(name, {}), name))
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        run, model, training = parts
        try:
            return RunConfig(name=run.name, model=model, training=training, sections=sections, path=path)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(f"{path}: {LINE.join(problems)}")


def naming_the_file(parse: Callable[[RunConfig], T]) -> Callable[[RunConfig], T]:
    """A parser of one more section, whose errors begin with the file as those of `load_run_config` do."""

    @functools.wraps(parse)
    def parsed(run: RunConfig) -> T:
        try:
            return parse(run)
        except ConfigError as error:
            raise ConfigError(f"{run.path}: {error}" if run.path else str(error)) from error

    return parsed


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
