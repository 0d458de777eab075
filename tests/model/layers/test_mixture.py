import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model import checkpoint, huggingface, pretrain
from model.config import CoreConfig, load_run_config
from model.errors import ConfigError
from model.layers.feed_forward import FeedForward
from model.layers.mixture import MixtureOfExperts
from model.optimizer import parameter_groups
from model.rqwen3 import RQwen3
from model.session import TrainSession
from model.windows import TokenWindows

CONFIG = CoreConfig(
    vocab_size=272,
    d_model=32,
    n_layer=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_seq_len=64,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
EXPERT_LINES = "num_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 32\nrouter_aux_loss_coef = 0.01"


def mixture(config: CoreConfig = CONFIG) -> MixtureOfExperts:
    torch.manual_seed(4)
    made = MixtureOfExperts(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


def make_sparse(tiny) -> None:
    """Give the tiny run experts in every other block."""
    text = tiny.config_path.read_text().replace("max_seq_len = 64", f"max_seq_len = 64\n{EXPERT_LINES}")
    tiny.config_path.write_text(text)


@pytest.mark.parametrize("chosen", [1, 2, 4])
def test_mixture_equals_a_loop_over_tokens_in_float64(chosen: int) -> None:
    made = mixture(dataclasses.replace(CONFIG, num_experts_per_tok=chosen))
    x_BTD = torch.randn(2, 9, 32)
    doubles = MixtureOfExperts(CONFIG).double()
    doubles.load_state_dict(made.state_dict())
    expected = torch.zeros(2, 9, 32, dtype=torch.float64)
    for b in range(2):
        for t in range(9):
            x = x_BTD[b, t].double()
            probabilities = torch.softmax(doubles.gate.weight @ x, 0)
            best = probabilities.argsort(descending=True)[:chosen].tolist()
            for i in best:
                expert = doubles.experts[i]
                out = expert.down_proj.weight @ (F.silu(expert.gate_proj.weight @ x) * (expert.up_proj.weight @ x))
                expected[b, t] += probabilities[i] / probabilities[best].sum() * out
    assert (made(x_BTD) - expected).abs().max() < 1e-5


def test_every_second_block_is_sparse_and_the_counts_are_those_of_the_model() -> None:
    model = RQwen3(CONFIG)
    assert [type(block.mlp) for block in model.model.layers] == [FeedForward, MixtureOfExperts] * 2
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.parameters()
    unused = 2 * 2 * 3 * 32 * 32  # two blocks, two experts that a token does not see
    assert CONFIG.parameters(active=True) == CONFIG.parameters() - unused
    dense = dataclasses.replace(CONFIG, num_experts=0)
    extra = 2 * (2 * 3 * 32 * 32 + 4 * 32 - 3 * 32 * 64)
    assert CONFIG.flops_per_token(64) == dense.flops_per_token(64) + 6 * extra
    grouped = [name for members in parameter_groups(model).values() for name in members]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())


def test_balance_loss_is_one_when_even_and_pulls_tokens_from_a_full_expert() -> None:
    made = mixture()
    with torch.no_grad():
        made.gate.weight.zero_()
    made(torch.randn(4, 16, 32))
    assert made.balance_loss is not None
    assert made.balance_loss.item() == pytest.approx(1.0)
    with torch.no_grad():
        made.gate.weight[0] = 1.0
    x_BTD = torch.rand(4, 16, 32)  # all positive: expert 0 is everyone's first
    made(x_BTD)
    uneven = made.balance_loss
    assert uneven.item() > 1.5
    uneven.backward()
    assert made.gate.weight.grad is not None
    assert (made.gate.weight.grad[0] * x_BTD.mean((0, 1))).sum() > 0  # a step down lowers its probability


def test_loss_keeps_the_value_of_the_cross_entropy_and_has_the_gradient_of_both() -> None:
    ids_BT = torch.randint(0, 272, (4, 33), generator=torch.Generator().manual_seed(1))
    inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    values, gradients = [], []
    for coefficient in (0.0, 0.5):
        model = RQwen3(dataclasses.replace(CONFIG, router_aux_loss_coef=coefficient))
        model.initialise(1)
        loss = model.loss(inputs_BT, targets_BT)
        loss.backward()
        values.append(loss.item())
        gradients.append(model.model.layers[3].mlp.gate.weight.grad)
    assert values[0] == values[1]
    model = RQwen3(CONFIG)
    model.initialise(1)
    hidden_BTD = model.model(inputs_BT)
    balance = 0.5 * sum(block.mlp.balance_loss for block in model.model.layers[1::2])
    (F.cross_entropy(model.lm_head(hidden_BTD).flatten(0, 1), targets_BT.flatten()) + balance).backward()
    assert (gradients[1] - model.model.layers[3].mlp.gate.weight.grad).abs().max() < 1e-6
    assert (gradients[1] - gradients[0]).abs().max() > 1e-5


def test_recomputed_blocks_give_the_same_gradients() -> None:
    ids_BT = torch.randint(0, 272, (2, 33), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, True):
        model = RQwen3(CONFIG)
        model.initialise(1)
        model.model.recompute = recompute
        model.loss(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_training_a_sparse_model_lowers_the_loss_and_uses_every_expert(tiny) -> None:
    make_sparse(tiny)
    tiny.set(max_steps=60, warmup_steps=5)
    session = TrainSession(tiny.config, TokenWindows(tiny.manifest, 32))
    loads = torch.zeros(4)
    layer = session.model.model.layers[1].mlp
    assert isinstance(layer, MixtureOfExperts)
    losses = [result.loss for _ in range(60) if (result := session.train_step()) is not None]
    tokens_SL = session._next_tokens()
    session.close()
    caught: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        session.model(tokens_SL[:, :-1])
    for x_BTD in caught:
        loads += torch.bincount((x_BTD @ layer.gate.weight.T).topk(2).indices.flatten(), minlength=4)
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    assert (loads / loads.sum()).min() > 0.05


def test_sparse_run_trains_saves_exports_and_is_read_by_transformers(tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from model.published import load_published

    make_sparse(tiny)
    tiny.set(max_steps=5)
    assert pretrain.main(tiny.arguments()) == 0
    final, out = tiny.checkpoints / "final.pt", tmp_path / "out"
    huggingface.export(final, tiny.config, tiny.root / "tokenizer.json", out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_moe"
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids_BT = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        expected = checkpoint.load_model(final, tiny.config.model)(ids_BT)
        assert (theirs(ids_BT).logits - expected).abs().max() < 1e-5
        assert torch.equal(load_published(out)(ids_BT), expected)


def test_shipped_sparse_profile_has_experts_in_every_other_block() -> None:
    model = load_run_config(Path(__file__).resolve().parents[3] / "configs" / "demo_moe.toml").model
    assert [model.is_sparse(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": -1}, "num_experts = -1 must not be negative"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 exceeds model.num_experts = 4"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0 must be at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be at least 1"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef = -0.1 must not be negative"),
    ],
)
def test_impossible_experts_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(CONFIG, **values)
    assert message in str(caught.value)
