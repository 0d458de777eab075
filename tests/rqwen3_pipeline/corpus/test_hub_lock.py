import pytest

from rqwen3_pipeline.corpus import hub_lock
from rqwen3_pipeline.corpus.filters import RULES
from rqwen3_pipeline.corpus.hub_lock import TOKENS_PER_TEXT_BYTE, tokens_per_byte
from rqwen3_pipeline.settings import SOURCES

from .made import prose, write


def test_every_source_has_a_rate():
    assert set(TOKENS_PER_TEXT_BYTE) == set(SOURCES) == set(RULES)


@pytest.mark.parametrize("most", [10_000, 16])
def test_yield_counts_the_kept_text_of_all_rows(tmp_path, config, monkeypatch, most):
    monkeypatch.setattr(hub_lock, "MEASURED_ROWS", most)
    texts = [prose(7) for _ in range(32)]
    rows = [{"text": text, "score": 4.0 if i % 2 else 1.0} for i, text in enumerate(texts)]
    path = write(tmp_path / "a.parquet", rows)
    kept_bytes = sum(len(text.encode()) for text in texts[1::2])
    wanted = kept_bytes * TOKENS_PER_TEXT_BYTE["fineweb_edu"] / 1000
    assert tokens_per_byte(path, 1000, "fineweb_edu", config) == pytest.approx(wanted)


def test_yield_of_a_file_without_rows_is_none(tmp_path, config):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([], pa.string()), "score": pa.array([], pa.float64())}), tmp_path / "e")
    assert tokens_per_byte(tmp_path / "e", 500, "fineweb_edu", config) == 0.0
