"""A compiler that fails changes no number: what it would have compiled runs eagerly."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from model.compiler import on_trial, run_eagerly
from model.config import CoreConfig
from model.rqwen3 import RQwen3

SMALL = CoreConfig(
    vocab_size=32,
    d_model=16,
    n_layer=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=32,
    max_seq_len=16,
)
IDS_BT = torch.arange(24).view(2, 12)


def gradients(model: RQwen3) -> list[torch.Tensor]:
    model.zero_grad()
    model.loss(IDS_BT[:, :-1], IDS_BT[:, 1:]).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def refuse(*_: object) -> None:
    raise RuntimeError("no compiler here\nand more lines")


@pytest.mark.parametrize("recompute", [False, True])
def test_block_that_fails_on_trial_runs_eagerly_and_those_after_it_do(recompute: bool) -> None:
    model, calls = RQwen3(SMALL), []
    model.initialise(1)
    model.model.recompute = recompute
    expected = gradients(model)
    first, second, third = model.model.layers
    first._compiled_call_impl = lambda *given: (calls.append("first"), first._call_impl(*given))[1]
    second._compiled_call_impl = refuse
    third._compiled_call_impl = lambda *given: calls.append("third")
    with on_trial(model) as failures:
        found = gradients(model)
    assert failures == ["no compiler here"]
    assert calls == ["first"] * (2 if recompute else 1)  # recomputed as it was computed
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert second._compiled_call_impl is refuse
    run_eagerly(model)
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), expected, strict=True))


def test_backward_graph_that_does_not_compile_is_seen_in_the_forward_pass() -> None:
    model = RQwen3(SMALL)
    model.initialise(1)
    expected = gradients(model)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=refuse)
    for block in model.model.layers:
        block.compile(backend=backend)
    with on_trial(model) as failures:
        found = gradients(model)
    assert "no compiler here" in failures[0]
    assert len(failures) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_memory_that_is_refused_on_trial_is_no_fault_of_the_compiler() -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = RQwen3(SMALL)
    model.initialise(1)
    model.model.layers[0]._compiled_call_impl = no_memory
    with pytest.raises(torch.OutOfMemoryError), on_trial(model):
        gradients(model)
