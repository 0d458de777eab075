"""A copy of a run's state in main memory, from which a checkpoint is written while training goes on.

Costs 3 · 4 bytes a parameter of main memory while the save lasts, and the time to copy them: on a CPU
about a second for 9 GB, from a GPU two or three (the copy goes to pageable memory: pinned memory
would be faster, but PyTorch rounds each pinned block up to a power of two, up to twice the size).
"""

import copy
from typing import Any

import torch

from model.host_memory import free_host_bytes

MARGIN, RESERVE_BYTES = 1.1, 512 * 2**20
"""A snapshot is taken if this many times its size fits and as much again stays free for all else."""


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nested state."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(tensor_bytes(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(entry) for entry in value)
    return 0


def fits_in_memory(state: dict[str, Any]) -> bool:
    """Whether a copy of the state can be held beside everything else, as measured now."""
    return free_host_bytes() >= MARGIN * tensor_bytes(state) + RESERVE_BYTES


def take(state: dict[str, Any]) -> dict[str, Any] | None:
    """Copy a state into main memory; None where the memory is refused after all.

    Tensors that are one (a tied head) stay one, so that the file is the same as without the copy.
    """
    try:
        taken = _copy(state, {})
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return taken


def _copy(value: Any, seen: dict[Any, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        key = (
            (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if value.numel()
            else id(value)
        )
        if key not in seen:
            seen[key] = value.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(value, dict):
        return type(value)((key, _copy(entry, seen)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value)(_copy(entry, seen) for entry in value)
    return copy.copy(value)
