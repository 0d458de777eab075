import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.order import WindowLayout, permute, window_count, window_numbers

SEEDS = st.integers(0, 2**63 - 1)


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 5))
def test_permute_over_all_positions_gives_each_window_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


@given(n=st.integers(1, 10**12), seed=SEEDS, data=st.data())
def test_permute_of_one_position_equals_the_same_within_many(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    together = permute(positions, n, seed, 0)
    assert [int(permute([p], n, seed, 0)[0]) for p in positions] == together.tolist()


def test_permute_is_the_same_on_every_machine() -> None:
    # Written down when the order was fixed: another value would move the data of a running training.
    assert permute(np.arange(8), 1000, 1234, 0).tolist() == [821, 144, 432, 175, 347, 473, 219, 608]


def test_permute_looks_random_neighbours_are_not_kept() -> None:
    order_ = permute(np.arange(10_000), 10_000, 7, 0)
    assert abs(np.corrcoef(order_[:-1], order_[1:])[0, 1]) < 0.05
    assert (order_ == permute(np.arange(10_000), 10_000, 7, 1)).mean() < 0.01


@pytest.mark.parametrize(("positions", "n"), [([5], 5), ([-1], 5), ([0], 0)])
def test_permute_outside_the_epoch_is_refused(positions: list[int], n: int) -> None:
    with pytest.raises(ValueError, match="positions must lie"):
        permute(positions, n, 1, 0)


@given(n=st.integers(1, 50), seed=SEEDS, cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_window_numbers_do_not_depend_on_how_the_run_is_cut(n: int, seed: int, cuts: list[int]) -> None:
    whole = window_numbers(0, sum(cuts), n, seed)
    starts = np.cumsum([0, *cuts[:-1]])
    parts = [window_numbers(int(start), count, n, seed) for start, count in zip(starts, cuts, strict=True)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    for epoch in range(sum(cuts) // n):
        assert sorted(whole[epoch * n : (epoch + 1) * n]) == list(range(n))


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_window_count_needs_one_token_more_than_the_context(tokens: int, windows: int) -> None:
    assert window_count(tokens, 8) == windows


@given(
    shards=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), min_size=1, max_size=9),
    seq_len=st.integers(1, 12),
)
def test_layout_reads_every_target_of_every_source_once(shards: list[tuple[str, int]], seq_len: int) -> None:
    layout = WindowLayout([source for source, _ in shards], [tokens for _, tokens in shards], seq_len)
    streams: dict[str, list[tuple[int, int]]] = {}
    for index, (source, tokens) in enumerate(shards):
        streams.setdefault(source, []).extend((index, i) for i in range(tokens))
    windows = [
        stream[k * seq_len : k * seq_len + seq_len + 1]
        for stream in streams.values()
        for k in range(max(0, (len(stream) - 1) // seq_len))
    ]
    assert layout.total == len(windows)
    assert layout.tokens == {source: len(stream) for source, stream in streams.items()}
    for number, expected in enumerate(windows):
        pieces = layout.pieces(number)
        assert [(p.shard, p.start + i) for p in pieces for i in range(p.tokens)] == expected
    for source, stream in streams.items():
        read = layout.windows[source] * seq_len + 1 if layout.windows[source] else 0
        assert layout.tail[source] == len(stream) - read < max(seq_len + 1, 2)


def test_layout_beyond_the_last_window_is_refused() -> None:
    layout = WindowLayout(["a"], [17], 8)
    assert layout.locate(1) == ("a", 8)
    with pytest.raises(ValueError, match="window 2 lies outside"):
        layout.locate(2)
