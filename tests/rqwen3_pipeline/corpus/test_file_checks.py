import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rqwen3_pipeline.assets.stages import BLOCKING, STAGE_CHECKS
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.file_checks import CHECKS

from .made import prose


@pytest.fixture
def checked(root, one_source):
    """A source of two files, filtered; runs a check over it."""
    config, lock = one_source("textbooks", *[[{"text": prose(10 * i + j)} for j in range(9)] for i in range(2)])
    for stage in ("raw", "filtered"):
        run_stage(stage, root, config, lock, items_of(stage, config, lock))
    raw = [root.raw("textbooks", file.name) for file in lock.files("textbooks")]

    def run(stage, name):
        return CHECKS[stage][name](root, config, lock, "textbooks", ["00000", "00001"])

    run.raw, run.filtered = raw, [root.filtered("textbooks", key) for key in ("00000", "00001")]
    return run


def test_checks_of_the_assets_are_those_there_are():
    assert {stage: tuple(checks) for stage, checks in CHECKS.items()} == STAGE_CHECKS
    assert {name for names in STAGE_CHECKS.values() for name in names} == set(BLOCKING)


def test_checks_of_good_files_find_nothing(checked):
    assert [checked(stage, name) for stage, checks in CHECKS.items() for name in checks] == [[]] * 5


@pytest.mark.parametrize(("stage", "place"), [("raw", "raw"), ("filtered", "filtered")])
def test_hashes_find_one_changed_bit_and_a_lost_file(checked, stage, place):
    first, second = getattr(checked, place)
    data = bytearray(first.read_bytes())
    data[50] ^= 1
    first.write_bytes(bytes(data))
    second.unlink()
    changed, lost = checked(stage, "hashes")
    assert first.name in changed
    assert second.name in lost
    assert "no file" in lost


def test_raw_columns_find_a_missing_column_and_other_rows(checked):
    pq.write_table(pa.table({"body": ["x"]}), checked.raw[0])
    pq.write_table(pa.table({"text": ["x"]}), checked.raw[1])
    missing, rows = checked("raw", "columns")
    assert "lacks the column 'text'" in missing
    assert "1 rows, the lock says 9" in rows


def test_filtered_columns_find_another_schema_and_other_rows(checked):
    table = pq.read_table(checked.filtered[0])
    pq.write_table(table.drop_columns(["url"]), checked.filtered[0])
    checked.filtered[1].write_bytes(b"no parquet")
    schema, damaged = checked("filtered", "columns")
    assert "columns row, id, text, not row, id, url, text" in schema
    assert "00001.parquet" in damaged
    pq.write_table(table[:5], checked.filtered[0])
    assert "5 rows, its stamp says 9" in checked("filtered", "columns")[0]


def test_share_kept_finds_a_source_that_keeps_too_little_only_when_enough_is_known(root, one_source):
    rows = [{"text": prose(1)}] + [{"text": "short"}] * 30
    config, lock = one_source("textbooks", rows, rows, min_share_kept=0.5)
    items = items_of("raw", config, lock)
    run_stage("raw", root, config, lock, items)

    def share():
        return CHECKS["filtered"]["share_kept"](root, config, lock, "textbooks", [])

    run_stage("filtered", root, config, lock, items[:1])
    assert share() == []
    run_stage("filtered", root, config, lock, items[1:])
    assert "2 of 62 rows kept, less than data.min_share_kept = 0.5" in share()[0]
