import dataclasses
from pathlib import Path

import pytest

from model.config import CoreConfig, RunConfig, TrainConfig, load_run_config
from model.config_build import build
from model.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = {
    "vocab_size": 151_936,
    "d_model": 1024,
    "n_layer": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_seq_len": 2048,
}
TRAINING = {"max_steps": 1000, "seq_len": 2048, "micro_batch_size": 8, "accumulation": 16}

FLOATS = [field.name for field in dataclasses.fields(TrainConfig) if field.type is float]
NOT_FINITE = [(name, value) for name in FLOATS for value in (float("inf"), float("-inf"), float("nan"))]


def test_production_shape_has_the_published_counts() -> None:
    config = CoreConfig(**MODEL)
    assert config.parameters() == 751_632_384
    assert config.block_parameters() == 15_730_944
    assert build(CoreConfig, {**MODEL, "tie_embeddings": True}, "model").parameters() == 596_049_920
    assert abs(config.flops_per_token(2048) - 4.985e9) < 1e6  # 6·(N − embedding) + 12·L·H·hd·T, to the digits published


def test_production_step_has_the_published_tokens() -> None:
    config = build(TrainConfig, TRAINING, "training")
    assert (config.sequences_per_step, config.tokens_per_step) == (128, 262_144)


def test_shipped_profiles_are_valid() -> None:
    profiles = sorted((REPOSITORY / "configs").glob("*.toml"))
    assert {"demo"} <= {load_run_config(path).name for path in profiles}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_step": 5}, "has no key 'max_step'. Did you mean 'max_steps'?"),
        ({"max_steps": "5"}, "training.max_steps = '5' must be of type int, not str"),
        ({"max_steps": True}, "must be of type int, not bool"),
        ({"keep_last": 0}, "training.keep_last = 0 must be above 0"),
        ({"warmup_steps": 1000}, "must be below training.max_steps"),
        ({"min_learning_rate": 1.0}, "is above"),
        ({"beta1": 1.0}, "must lie in"),
        ({"device": "tpu"}, "none of auto, cpu, cuda"),
        ({"grad_clip": float("inf")}, "training.grad_clip = inf must be a finite number; 0 switches clipping off"),
        ({"save_every_minutes": float("nan")}, "training.save_every_minutes = nan must be a finite number; 0 is never"),
        *(({name: value}, f"training.{name} = {value} must be a finite number") for name, value in NOT_FINITE),
    ],
)
def test_unusable_value_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(TrainConfig, {**TRAINING, **values}, "training")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_kv_heads": 5}, "not a multiple"),
        ({"head_dim": 7}, "must be even"),
        ({"dropout": 1.0}, "must lie in"),
        ({"n_layer": 0}, "at least 1"),
    ],
)
def test_impossible_shape_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(CoreConfig, {**MODEL, **values}, "model")


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="lacks seq_len"):
        build(TrainConfig, {"max_steps": 1000, "micro_batch_size": 1}, "training")


def test_whole_number_serves_as_float() -> None:
    assert build(TrainConfig, {**TRAINING, "grad_clip": 1}, "training").grad_clip == 1.0


def test_what_no_sidecar_can_hold_is_refused_anywhere_in_a_file_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        (REPOSITORY / "configs" / "demo.toml").read_text().replace("[training]", "[training]\nadam_eps = nan")
        + "[data.more]\nratio = [1.0, [-inf]]\n[evaluation.more]\nday = 2024-05-01\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    for part in (
        "training.adam_eps = nan must be a finite number",
        "data.more.ratio = -inf must be a finite number",
        'evaluation.more.day = 2024-05-01 must be text: write "2024-05-01"',
    ):
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run\n", "not valid TOML"),
        ("[runs]\n", "has no section 'runs'. Did you mean 'run'?"),
        ("run = 3\n", "must be a table"),
        ("[run]\nname = 'Demo!'\n", "lacks"),
    ],
)
def test_unusable_file_is_refused_naming_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothere\.toml: no such file"):
        load_run_config(tmp_path / "nothere.toml")


@pytest.mark.parametrize("name", ["", "Demo", "a/b", "../a", "-a", "a" * 65])
def test_experiment_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunConfig(name=name, model=CoreConfig(**MODEL), training=build(TrainConfig, TRAINING, "training"))


def test_sequence_longer_than_the_tables_is_refused() -> None:
    training = build(TrainConfig, {**TRAINING, "seq_len": 4096}, "training")
    with pytest.raises(ConfigError, match=r"training\.seq_len = 4096 exceeds"):
        RunConfig(name="a", model=CoreConfig(**MODEL), training=training)


def test_everything_unusable_in_a_file_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        "[run]\nname = 'a'\n[modle]\n[model]\nd_modle = 3\nnum_head = 2\n[training]\nmax_steps = 'x'\nseed = 1.5\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    told = str(caught.value)
    for part in (
        "has no section 'modle'. Did you mean 'model'?",
        "[model] has no key 'd_modle'. Did you mean 'd_model'? It has no key 'num_head'. Did you mean 'num_heads'?",
        "[model] lacks vocab_size, d_model",
        "training.max_steps = 'x' must be of type int, not str",
        "training.seed = 1.5 must be of type int, not float",
        "[training] lacks seq_len, micro_batch_size",
    ):
        assert part in told, told
