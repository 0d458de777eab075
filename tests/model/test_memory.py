import pytest

from model.config import CoreConfig, TrainConfig
from model.memory import HEAD_CHUNK_BYTES, checkpoint_bytes, plan_memory

PRODUCTION = CoreConfig(
    vocab_size=151_936,
    d_model=1024,
    n_layer=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_seq_len=2048,
)


def test_checkpoint_bytes_at_production_shape_are_those_of_the_published_files() -> None:
    assert checkpoint_bytes(PRODUCTION) == 12 * 751_632_384
    assert abs(checkpoint_bytes(PRODUCTION) / 9_019_588_608 - 1) < 1e-4


@pytest.mark.parametrize(("micro_batch_size", "published_gib"), [(2, 19), (4, 24), (8, 35)])
def test_peak_at_production_shape_is_near_the_published_estimates(micro_batch_size: int, published_gib: float) -> None:
    training = TrainConfig(max_steps=1000, seq_len=2048, micro_batch_size=micro_batch_size)
    assert abs(plan_memory(PRODUCTION, training).peak_gib / published_gib - 1) < 0.06


def test_head_chunk_is_that_of_the_loss() -> None:
    from model.loss import CHUNK_BYTES

    assert {"cpu": HEAD_CHUNK_BYTES[False], "cuda": HEAD_CHUNK_BYTES[True]} == CHUNK_BYTES
