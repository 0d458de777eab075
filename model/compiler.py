"""The compiler of the blocks: each is compiled in place at its first use, in a pass that is thrown away.

A compiler that does not work (none on a node, a full cache) must not end a run, nor part the ranks that
train it: they would wait for each other in different exchanges. So a block that fails on trial runs
eagerly at once, at the same place among the exchanges, and its backward graph is compiled with its
forward one. Costs the compilation, which would come anyway, and the pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn

from model.rqwen3 import RQwen3


def compile_blocks(model: RQwen3) -> str | None:
    """Let each block be compiled at its first use (parameter names stay); why not, where that fails."""
    try:
        torch._dynamo.config.suppress_errors = True  # pyright: ignore[reportPrivateImportUsage] a failing shape runs eagerly
        for block in model.model.layers:
            block.compile()
    except Exception as error:
        return _in_a_line(error)
    return None


def run_eagerly(model: RQwen3) -> None:
    """Take the compiler from the blocks."""
    for block in model.model.layers:
        block._compiled_call_impl = None


@contextlib.contextmanager
def on_trial(model: RQwen3) -> Iterator[list[str]]:
    """Let blocks whose compiler fails run eagerly meanwhile; gives a list that fills with what was seen of failures."""
    failures: list[str] = []
    compiled = [(block, block._compiled_call_impl) for block in model.model.layers]
    for block, call in compiled:
        block._compiled_call_impl = _Trial(block, call or block._call_impl, failures)
    dynamo = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
    try:
        with dynamo.patch(suppress_errors=False), functorch.patch(force_non_lazy_backward_lowering=True):
            yield failures
    finally:
        for block, call in compiled:
            block._compiled_call_impl = call


@dataclass
class _Trial:
    """A block's compiled call, or its eager one from the first failure of any block on."""

    block: nn.Module
    compiled: Callable[..., Any]
    failures: list[str]
    eager: bool | None = None
    """Settled by the first call: recomputing must do the same again, and ends by an exception."""

    def __call__(self, *arguments: Any) -> Any:
        if self.eager is None:
            self.eager = bool(self.failures)
            if not self.eager:
                try:
                    return self.compiled(*arguments)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self.failures.append(_in_a_line(error))
                    self.eager = True
        return self.block._call_impl(*arguments) if self.eager else self.compiled(*arguments)


def _in_a_line(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # dynamo's own first line names no reason
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
