import pytest
import torch

from model import generate as generation
from model.config import CoreConfig
from model.errors import ConfigError, CorpusError
from model.generate import Sampling, choose, generate
from model.rqwen3 import RQwen3

CONFIG = CoreConfig(
    vocab_size=50,
    d_model=16,
    n_layer=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_seq_len=32,
)


@pytest.fixture
def model() -> RQwen3:
    built = RQwen3(CONFIG)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.3)
    return built


def test_greedy_equals_a_loop_without_cache(model: RQwen3) -> None:
    ids = [1, 2, 3]
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]))[0, -1, :40].argmax()))
    assert generate(model, [1, 2, 3], 40, 49, Sampling(new_tokens=10)) == ids[3:]
    assert model.training


def test_generation_stops_at_the_end_of_text_and_does_not_return_it(model: RQwen3) -> None:
    ids = generate(model, [1, 2, 3], 40, 49, Sampling(new_tokens=10))
    eos = ids[4]
    assert generate(model, [1, 2, 3], 40, eos, Sampling(new_tokens=10)) == ids[: ids.index(eos)]


def test_ids_without_text_are_never_chosen(model: RQwen3) -> None:
    with torch.no_grad():
        model.lm_head.weight[40:] *= 100
    ids = generate(model, [1], 40, 49, Sampling(new_tokens=30, temperature=50.0))
    assert len(ids) == 30
    assert max(ids) < 40


def test_generation_ends_with_the_context_and_takes_the_prompts_tail(model: RQwen3) -> None:
    assert len(generate(model, [1] * 4, 40, 49, Sampling(new_tokens=1000))) == 32
    long, tail = list(range(39)), list(range(39))[-22:]
    sampling = Sampling(new_tokens=10)
    assert generate(model, long, 40, 49, sampling) == generate(model, tail, 40, 49, sampling)
    assert generate(model, [], 40, 49, sampling) == generate(model, [49], 40, 49, sampling)


def test_choice_follows_temperature_and_top_p() -> None:
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()
    draws = [
        choose(logits, Sampling(temperature=1.0), g) for g in [torch.Generator().manual_seed(1)] for _ in range(4000)
    ]
    shares = torch.bincount(torch.tensor(draws), minlength=4) / 4000
    assert (shares - torch.tensor([0.6, 0.25, 0.1, 0.05])).abs().max() < 0.03
    generator = torch.Generator().manual_seed(1)
    narrow = {choose(logits, Sampling(temperature=1.0, top_p=0.7), generator) for _ in range(500)}
    assert narrow == {0, 1}
    assert {choose(logits, Sampling(temperature=1.0, top_p=0.5), generator) for _ in range(50)} == {0}
    assert {choose(logits, Sampling(), generator) for _ in range(50)} == {0}


def test_generation_moves_no_random_generator_but_its_own_and_restores_the_mode(model: RQwen3) -> None:
    for training in (True, False):
        model.train(training)
        before = torch.get_rng_state()
        generate(model, [1], 40, 49, Sampling(new_tokens=5, temperature=1.0, seed=3))
        assert torch.equal(torch.get_rng_state(), before)
        assert model.training is training
    model.model.layers[0].mlp = torch.nn.Identity()
    del model.model.layers[1].mlp.down_proj
    model.train()
    with pytest.raises(AttributeError):
        generate(model, [1], 40, 49, Sampling(new_tokens=5))
    assert model.training


def test_any_of_several_end_ids_stops_and_without_any_a_prompt_is_needed(model: RQwen3) -> None:
    ids = generate(model, [1, 2, 3], 40, 49, Sampling(new_tokens=10))
    ends = frozenset((49, ids[4], ids[7]))
    first = min(ids.index(ids[4]), ids.index(ids[7]))
    assert generate(model, [1, 2, 3], 40, ends, Sampling(new_tokens=10)) == ids[:first]
    assert len(generate(model, [1, 2, 3], 40, frozenset(), Sampling(new_tokens=10))) == 10
    with pytest.raises(ConfigError, match="--prompt is empty"):
        generate(model, [], 40, frozenset(), Sampling())


def test_same_seed_gives_the_same_text(model: RQwen3) -> None:
    texts = [generate(model, [1], 40, 49, Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"new_tokens": 0}])
def test_unusable_sampling_is_refused_by_flag(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--"):
        Sampling(**values)  # pyright: ignore[reportArgumentType]


def test_tokenizer_that_is_none_is_refused(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"tokenizer\.json: not readable as a tokenizer"):
        generation.load_tokenizer(tmp_path / "tokenizer.json")
