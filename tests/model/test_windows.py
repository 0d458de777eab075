import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from model.errors import CorpusError
from model.files import sha256_file, write_json
from model.order import window_numbers
from model.shard_format import read_manifest
from model.windows import STEPS_AHEAD, StepReader, TokenWindows
from tests.model.conftest import REPOSITORY


def edit(tiny, index: int, change: Callable[[np.ndarray], np.ndarray], rehash: bool = False) -> None:
    """Change a shard's tokens on disk, and its hash in the manifest if asked."""
    data = json.loads(tiny.manifest_path.read_text())
    path = tiny.root / data["shards"][index]["path"]
    path.write_bytes(change(np.fromfile(path, "<u4")).tobytes())
    if rehash:
        data["shards"][index]["sha256"] = sha256_file(path)
        tiny.manifest_path.write_text(json.dumps(data))


def test_windows_of_an_epoch_hold_each_target_of_each_source_once(tiny) -> None:
    windows = TokenWindows(tiny.manifest, 32)
    streams: dict[str, list[int]] = {}
    for entry in tiny.manifest.shards:
        streams.setdefault(entry.source, []).extend(np.fromfile(tiny.root / entry.path, "<u4").tolist())
    read_ = windows.read(window_numbers(0, len(windows), len(windows), 5))
    expected = [
        stream[start : start + 33]
        for stream in streams.values()
        for start in range(0, len(stream) - 32, 32)
        if start + 33 <= len(stream)
    ]
    assert sorted(read_.tolist()) == sorted(expected)


def test_step_reader_reads_the_same_from_any_start(tiny) -> None:
    windows = TokenWindows(tiny.manifest, 32)
    straight = StepReader(windows, 0, 8, seed=3)
    steps = [straight.next() for _ in range(5)]
    resumed = StepReader(windows, 24, 8, seed=3)
    assert np.array_equal(resumed.next(), steps[3])
    assert np.array_equal(resumed.next(), steps[4])
    straight.close()
    resumed.close()


def test_check_of_a_whole_corpus_says_nothing(tiny) -> None:
    TokenWindows(tiny.manifest, 32).check(hash_all=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: np.where(np.arange(len(t)) == 9, 257, t).astype("<u4"),
            r"token 9 is 257, but the tokenizer has 257",
        ),
        (lambda t: t.astype(">u4"), r"has 257 ids: its bytes are in the other \(big-endian\) order"),
        (lambda t: np.concatenate([t[:-50], np.zeros(50, "<u4")]), "ends with id 0, not with the end-of-text id 256"),
    ],
)
def test_check_of_a_damaged_shard_names_it_even_where_the_hash_agrees(tiny, change, message: str) -> None:
    edit(tiny, 1, change, rehash=True)
    with pytest.raises(CorpusError, match=message) as caught:
        TokenWindows(tiny.manifest, 32).check()
    assert "wikipedia-00000-01.bin" in str(caught.value)


def test_check_of_one_changed_id_is_found_by_its_hash(tiny) -> None:
    edit(tiny, 2, lambda t: np.where(np.arange(len(t)) == 3, (t + 1) % 256, t).astype("<u4"))
    with pytest.raises(CorpusError, match=r"textbooks-00000-00\.bin: SHA-256"):
        TokenWindows(tiny.manifest, 32).check()


def test_open_with_a_short_or_missing_shard_is_refused(tiny) -> None:
    edit(tiny, 0, lambda t: t[:-1])
    with pytest.raises(CorpusError, match=r"wikipedia-00000-00\.bin: .* bytes"):
        TokenWindows(tiny.manifest, 32)
    (tiny.root / "tokens/wikipedia-00000-00.bin").unlink()
    with pytest.raises(CorpusError, match="is not there"):
        TokenWindows(tiny.manifest, 32)


@pytest.mark.parametrize(
    ("bytes_of", "message"),
    [
        (lambda t: t.astype(">u4").tobytes(), "big-endian"),
        (lambda t: t.astype("<u2").tobytes(), "it looks like 16-bit tokens"),
        (lambda t: t.tobytes() + b"\0", "the write was cut, or the file is another one"),
        (lambda t: t[:-96].tobytes(), "the write was cut"),
        (lambda t: np.where(np.arange(len(t)) == 5, 151_936, t).astype("<u4").tobytes(), "token 5 is 151,936"),
        (lambda t: t[:-40].tobytes() + bytes(160), "ends with id 0"),
        (lambda t: np.where(np.arange(len(t)) == 7, t ^ 1, t).astype("<u4").tobytes(), "SHA-256"),
        (lambda t: t[::-1].tobytes(), "wikipedia-00000-01"),
    ],
)
def test_each_kind_of_damage_is_refused_by_name_before_the_first_step(tiny, bytes_of, message: str) -> None:
    path = tiny.root / tiny.manifest.shards[1].path
    path.write_bytes(bytes_of(np.fromfile(path, "<u4")))
    with pytest.raises(CorpusError, match=message) as caught:
        TokenWindows(tiny.manifest, 32).check()
    assert path.name in str(caught.value)
    assert "rqwen3 corpus build" in str(caught.value)


CASE = REPOSITORY.parent / "shared" / "cases" / "T07"


@pytest.mark.skipif(not CASE.exists(), reason="the shared cases are not there")
@pytest.mark.parametrize(
    "name", ["big_endian", "uint16", "odd_bytes", "short", "id_too_big", "zero_tail", "one_id_changed", "good"]
)
def test_shared_damaged_shards_are_refused_by_name(tmp_path, name: str) -> None:
    facts = json.loads((CASE / "facts.json").read_text())
    path = f"tokens/{name}.bin"
    (tmp_path / "tokens").mkdir()
    (tmp_path / path).write_bytes((CASE / f"{name}.bin").read_bytes())
    last = int(np.fromfile(CASE / "good.bin", "<u4")[-1])
    entry = {"path": path, "source": "a", "tokens": facts["tokens"], "documents": 1, "sha256": facts["sha256_good"]}
    tokenizer = {"path": "tokenizer.json", "vocab_size": facts["vocab_size"], "eos_id": last}
    write_json(
        tmp_path / "manifest.json", {"format_version": 1, "tokenizer": tokenizer, "shards": [entry], "heldout": []}
    )
    if name == "good":
        TokenWindows(read_manifest(tmp_path / "manifest.json"), 32).check()
        return
    with pytest.raises(CorpusError, match=f"{name}.bin"):
        TokenWindows(read_manifest(tmp_path / "manifest.json"), 32).check()


def test_reader_stopped_while_it_waits_gives_the_same_tokens_afterwards(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    windows, may_read = TokenWindows(tiny.manifest, 32), threading.Event()
    expected = windows.read(window_numbers(0, 8, len(windows), 3))
    read = windows.read
    monkeypatch.setattr(windows, "read", lambda *arguments: (may_read.wait(), read(*arguments))[1])
    reader = StepReader(windows, 0, 8, seed=3)
    assert reader.next(lambda: True) is None
    may_read.set()
    assert np.array_equal(reader.next(), expected)
    reader.close()


def test_reader_reads_no_more_than_its_bound_ahead(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    windows, reads = TokenWindows(tiny.manifest, 32), threading.Semaphore(0)
    read = windows.read
    monkeypatch.setattr(windows, "read", lambda *arguments: (reads.release(), read(*arguments))[1])
    reader = StepReader(windows, 0, 8, seed=3)
    for _ in range(STEPS_AHEAD + 1):  # those in the queue, and one in hand
        assert reads.acquire(timeout=60)
    assert not reads.acquire(timeout=0.5)
    reader.next()
    assert reads.acquire(timeout=60)
    reader.close()


def test_reader_names_damage_that_appears_while_it_reads(tiny) -> None:
    windows = TokenWindows(tiny.manifest, 32)
    for index in range(3):
        edit(tiny, index, lambda t: np.full_like(t, 4000))
    reader = StepReader(windows, 0, 8, seed=3)
    for _ in range(2):  # whoever asks again is told again
        with pytest.raises(CorpusError, match="is 4,000, but the tokenizer has 257"):
            reader.next()
    reader.close()


def test_open_without_any_window_is_refused(tiny) -> None:
    with pytest.raises(CorpusError, match="hold no window of 1000001"):
        TokenWindows(tiny.manifest, 1_000_000)


def test_read_of_an_id_that_appeared_after_the_check_is_refused(tiny) -> None:
    windows = TokenWindows(tiny.manifest, 32)
    edit(tiny, 0, lambda t: np.full_like(t, 4000))
    with pytest.raises(CorpusError, match="token 0 is 4,000"):
        windows.read([0])
