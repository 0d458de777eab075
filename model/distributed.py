"""Several processes as one trainer: what torchrun started together shares each step's windows.

`parallel = "ddp"` keeps the whole model on every rank and adds up the gradients; `"fsdp"` (FSDP2's
`fully_shard`, block by block) spreads weights, gradients and moments over the ranks, and gathers a
block's weights while it is at work. Both train in the numbers of one process: the loss of each rank
is summed, not averaged, over the step's tokens. A step costs one all-reduce of the gradients (DDP: 4
bytes a parameter) or three passes of the weights (FSDP), and per micro-batch one number over a CPU
group, by which all ranks agree whether to stop. Under torchrun alone; one process needs none of it.
"""

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from model import errors
from model.config import TrainConfig
from model.errors import ConfigError, OtherRankError, RQwen3Error
from model.rqwen3 import RQwen3

T = TypeVar("T")
FAILURE = "rqwen3/failure"
"""Key in the store: the rank that failed first, and its error."""
FORWARD_METHODS = ("loss", "token_losses")
"""Methods of the model that need its weights gathered, beside `forward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """The processes that train one run together; by default one alone."""

    rank: int = 0
    """This process's number, from 0."""
    size: int = 1
    """How many there are."""
    words: dist.ProcessGroup | None = None
    """A group over CPUs for what the ranks tell each other, which never waits for a GPU; None is the default group."""
    store: Store | None = None
    """Where a rank that fails says why; torchrun keeps it, so that it outlives the rank."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes, logs and holds the lock."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a CPU tensor, the same bits on each."""
        if self.size > 1:
            dist.all_reduce(values, group=self.words)
        return values

    def agree(self, reason: str | None) -> str | None:
        """One rank's reason to stop becomes that of all; the lowest rank's where several have one.

        Every rank must ask equally often.
        """
        if self.size == 1 or not self.sum(torch.tensor(int(reason is not None))):
            return reason
        reasons: list[str | None] = [None] * self.size
        dist.all_gather_object(reasons, reason, group=self.words)
        return next(found for found in reasons if found is not None)

    def first_does(self, work: Callable[[], T]) -> T:
        """What the first rank's `work` returns; it runs there alone, and its errors are everyone's."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        error: Exception | None = None
        if self.first:
            try:
                outcome[0] = work()
            except Exception as caught:
                error, outcome[1] = caught, _portable(caught)
        dist.broadcast_object_list(outcome, src=0, group=self.words)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise OtherRankError(0, outcome[1])
        return outcome[0]

    def blame(self, error: BaseException) -> BaseException:
        """Tell the others what this rank fails with, unless it follows from another's failure: then that is returned.

        An error without words of its own may follow from one: the others' exchanges break when a rank ends.
        """
        if self.store is None or isinstance(error, OtherRankError):
            return error
        with contextlib.suppress(RuntimeError):  # the store may be gone, with torchrun
            if not isinstance(error, RQwen3Error):
                if self.store.check([FAILURE]):
                    return OtherRankError(*_retold(self.store.get(FAILURE)))
                error.add_note(f"on rank {self.rank} of {self.size}")
            words = str(error) if isinstance(error, RQwen3Error) else repr(error)
            self.store.set(FAILURE, json.dumps([self.rank, type(error).__name__, words]))
        return error


def _retold(said: bytes) -> tuple[int, BaseException]:
    """A rank, and the error that it failed with, from the words that it left in the store."""
    rank, kind, words = json.loads(said)
    known = getattr(errors, kind, None)
    return rank, known(words) if known is not None and issubclass(known, RQwen3Error) else RQwen3Error(words)


def _portable(error: BaseException) -> BaseException:
    """The error, or where it can't travel to another process, its words."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


def first_process() -> bool:
    """Whether this is the process that speaks on the console, known before the others are met."""
    return os.environ.get("RANK", "0") == "0"


def join(device: str) -> Team:
    """Meet the processes that torchrun started with this one; alone where there are none.

    Args:
        device: the configuration's `auto`, `cpu` or `cuda`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return Team()
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
    words: Any = dist.new_group(backend="gloo") if cuda else None  # torch names its type loosely
    return Team(rank=rank, size=size, words=words, store=store)


def leave(team: Team) -> None:
    """Part from the others."""
    if team.size > 1:
        dist.destroy_process_group()


def micro_batches_each(config: TrainConfig, team: Team) -> int:
    """Micro-batches of a step on one rank: `accumulation` counts those of all ranks together.

    Raises:
        ConfigError: they can't be shared out evenly; the message says what would do.
    """
    if config.accumulation % team.size == 0:
        return config.accumulation // team.size
    sequences = config.sequences_per_step
    fitting = [size for size in range(1, sequences + 1) if sequences % size == 0 and sequences // size % team.size == 0]
    advice = (
        f"Set micro_batch_size = {(near := min(fitting, key=lambda size: abs(size - config.micro_batch_size)))}, "
        f"accumulation = {sequences // near}."
        if fitting
        else f"No share-out of {sequences} sequences does; start a number of processes that divides {sequences}."
    )
    raise ConfigError(
        f"training.accumulation = {config.accumulation} micro-batches a step can't be shared by {team.size} processes "
        f"evenly. {advice}"
    )


class SharedModel:
    """The model as its ranks train it together; with one rank, the model itself."""

    def __init__(self, model: RQwen3, team: Team, parallel: str) -> None:
        """Wrap `model`, which lies on this rank's device with equal weights on all; names stay."""
        self.model = model
        self.loss: Callable[[Tensor, Tensor, int], Tensor] = model.loss
        self._ddp: DistributedDataParallel | None = None
        self._sharded: list[FSDPModule] = []
        if team.size == 1:
            return
        if parallel == "ddp":
            self._ddp = DistributedDataParallel(_Loss(model))
            self.loss = self._ddp
            return
        mesh = init_device_mesh(model.lm_head.weight.device.type, (team.size,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        for method in FORWARD_METHODS:
            register_fsdp_forward_method(model, method)
        self.loss = model.loss
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: the ranks exchange gradients in the last one only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def drop_gradients(self) -> None:
        """Forget all gradients, also those that FSDP keeps with the gathered weights until the ranks exchange them.

        Every rank must ask.
        """
        self.model.zero_grad(set_to_none=True)
        for module in self._sharded:  # one by one: all at once may not fit
            module.unshard()
            self.model.zero_grad(set_to_none=True)
            module.reshard()

    def initialise(self, seed: int) -> None:
        """Fill the weights as `RQwen3.initialise` does."""
        if not self._sharded:
            self.model.initialise(seed)
            return
        fresh = RQwen3(self.model.config)
        fresh.initialise(seed)
        self.model.load_state_dict(spread_weights(fresh.state_dict(), self.model))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Every rank holds all weights meanwhile, so that any part of the model may be called."""
        for module in self._sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in self._sharded:
                module.reshard()


class _Loss(nn.Module):
    """`RQwen3.loss` as a forward pass, which is what DDP knows how to wrap."""

    def __init__(self, model: RQwen3) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, divisor: int) -> Tensor:
        return self.model.loss(ids_BT, targets_BT, divisor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor with no part of it on another rank; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(state: Any, team: Team) -> Any:
    """A state of weights and moments with no tensor spread over ranks; every rank must ask.

    Tensors that were spread come to the first rank's CPU memory, and are dropped on the others.
    """
    if isinstance(state, DTensor):
        full = state.full_tensor()
        return full.cpu() if team.first else None
    if isinstance(state, dict):
        return {key: whole(value, team) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value, team) for value in state]
    return state


def spread_like(tensor: Any, like: Tensor) -> Any:
    """A whole tensor, equal on all ranks, spread as `like` is; anything else as it is."""
    if isinstance(tensor, Tensor) and isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def spread_weights(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Whole weights, spread as the model's are."""
    mine = model.state_dict()
    return {name: spread_like(tensor, mine[name]) if name in mine else tensor for name, tensor in weights.items()}


def spread_moments(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole optimiser state, as `Optimizer.state_dict` numbers it, spread as the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {name: spread_like(value, parameters[number]) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": moments}
