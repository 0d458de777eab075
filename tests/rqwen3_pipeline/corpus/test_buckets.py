import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rqwen3_pipeline.corpus import buckets
from rqwen3_pipeline.corpus.buckets import PairFile, equal_digests, shadow_pairs, shadows, stored_digests


def oracle(digest_):
    """The pairs by a plain dict over bytes."""
    seen = {}
    return {i: seen[key] for i, key in enumerate(map(bytes, digest_)) if seen.setdefault(key, i) != i}


def drawn(seed, documents, kinds, alike):
    """Digests of `kinds` kinds that are equal in their first `alike` bytes."""
    draw = np.random.default_rng(seed)
    kind_ = draw.integers(0, 256, (kinds, 32), dtype=np.uint8)
    kind_[:, :alike] = kind_[0, :alike]
    return kind_[draw.integers(0, kinds, documents)]


def pairs_of(digest_, chunk, bucket):
    found = {}
    for later_, first_ in shadow_pairs(
        lambda: (digest_[i : i + chunk] for i in range(0, len(digest_), chunk)), len(digest_), bucket
    ):
        assert (np.diff(later_) > 0).all()
        assert not set(later_.tolist()) & set(found)
        found.update(zip(later_.tolist(), first_.tolist(), strict=True))
    return found


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 3000),
    st.integers(1, 3000),
    st.sampled_from([0, 4, 16, 31]),
    st.integers(1, 6),
    st.integers(1, 12),
)
def test_pairs_by_buckets_equal_a_plain_dict(seed, documents, kinds, alike, chunks, buckets):
    digest_ = drawn(seed, documents, kinds, alike)
    assert pairs_of(digest_, documents // chunks + 1, documents // buckets + 1) == oracle(digest_)


@pytest.mark.parametrize("kinds", [1, 3, 12_000])
def test_pairs_of_far_more_digests_than_a_bucket_expects_equal_a_plain_dict(kinds):
    """All of one prefix, so that they fall into one bucket: a flood of copies, or of collisions."""
    digest_ = drawn(7, 12_000, kinds, 16)
    assert pairs_of(digest_, 500, 100) == oracle(digest_)


def test_room_for_a_flood_of_copies_does_not_grow(monkeypatch):
    digest_ = drawn(7, 50_000, 2, 16)
    largest = []
    honest = buckets.equal_digests
    monkeypatch.setattr(buckets, "equal_digests", lambda array_: largest.append(len(array_)) or honest(array_))
    assert pairs_of(digest_, 500, 1000) == oracle(digest_)
    assert max(largest) < 3000


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 31))
def test_shadows_are_the_first_of_equal_digests(values, byte):
    digest_ = np.zeros((len(values), 32), dtype=np.uint8)
    digest_[:, byte] = values
    assert shadows(digest_).tolist() == [values.index(value) for value in values]
    later_, first_ = equal_digests(digest_)
    assert dict(zip(later_.tolist(), first_.tolist(), strict=True)) == oracle(digest_)


def test_shadows_look_at_all_32_bytes():
    digest_ = np.repeat(np.arange(32, dtype=np.uint8)[None], 33, axis=0)
    for byte in range(32):
        digest_[byte, byte] += 1
    assert shadows(digest_).tolist() == list(range(33))
    assert [array.tolist() for array in equal_digests(digest_)] == [[], []]


def test_stored_digests_come_back_in_order_and_in_parts(tmp_path):
    digest_ = drawn(1, 1000, 900, 0)
    np.save(tmp_path / "d.npy", digest_)
    parts = list(stored_digests(tmp_path / "d.npy", 300))
    assert [len(part_) for part_ in parts] == [300, 300, 300, 100]
    assert np.array_equal(np.concatenate(parts), digest_)
    np.save(tmp_path / "none.npy", digest_[:0])
    assert list(stored_digests(tmp_path / "none.npy")) == []


def test_pair_file_gives_the_pairs_of_a_range_in_order_and_leaves_nothing(tmp_path):
    with PairFile(tmp_path / "x" / "pairs") as pairs:
        assert [array.tolist() for array in pairs.between(0, 10)] == [[], []]
        pairs.add(np.array([3, 8]), np.array([1, 2]))
        pairs.add(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
        pairs.add(np.array([5, 7, 9]), np.array([0, 4, 6]))
        assert [array.tolist() for array in pairs.between(0, 100)] == [[3, 5, 7, 8, 9], [1, 0, 4, 2, 6]]
        assert [array.tolist() for array in pairs.between(5, 9)] == [[5, 7, 8], [0, 4, 2]]
    assert list((tmp_path / "x").iterdir()) == []
