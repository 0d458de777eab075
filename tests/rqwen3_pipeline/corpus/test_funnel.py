import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.errors import SourceError
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.funnel import as_json, as_table, require_source_kept, source_funnel
from rqwen3_pipeline.corpus.lock import lock_folder

from .made import prose

GOOD, SHORT = {"text": prose(1)}, {"text": "short"}


def do(root, config, lock, *items):
    for stage in ("raw", "filtered"):
        outcomes = run_stage(stage, root, config, lock, items or items_of(stage, config, lock))
        assert not [outcome.error for outcome in outcomes if outcome.error]


def test_funnel_adds_up_the_files_that_are_done(root, one_source):
    config, lock = one_source("textbooks", [GOOD] * 5 + [SHORT] * 2, [GOOD] * 3 + [{"text": None}, {"text": " "}])
    do(root, config, lock)
    found = source_funnel(root, config, lock, "textbooks")
    assert found.funnel == {"kept": 8, "too_short": 2, "blank": 1, "null_text": 1}
    assert list(found.funnel) == ["kept", "too_short", "blank", "null_text"]
    assert (found.files, found.files_filtered, found.rows, found.kept) == (2, 2, 12, 8)
    assert found.kept_chars == 8 * len(prose(1))
    assert sum(found.length_histogram["counts"]) == 8
    assert found.share_kept == pytest.approx(8 / 12)


def test_funnel_of_half_a_source_says_so(root, one_source):
    config, lock = one_source("textbooks", [GOOD] * 5, [GOOD] * 5)
    empty = source_funnel(root, config, lock, "textbooks")
    assert (empty.rows, empty.files_filtered, empty.share_kept, empty.funnel) == (0, 0, None, {})
    do(root, config, lock, ("textbooks", "00001"))
    found = source_funnel(root, config, lock, "textbooks")
    assert (found.rows, found.files_filtered) == (5, 1)
    assert "1 of 2 files" in as_table({"textbooks": found})


def test_funnel_leaves_out_what_other_settings_made(root, one_source, make_config):
    config, lock = one_source("textbooks", [GOOD] * 5)
    do(root, config, lock)
    assert source_funnel(root, make_config(textbooks={"min_chars": 7}), lock, "textbooks").files_filtered == 0


def test_funnel_as_a_table_has_a_line_for_each_reason(root, one_source):
    config, lock = one_source("textbooks", [GOOD] * 3 + [SHORT])
    do(root, config, lock)
    funnel = {"textbooks": source_funnel(root, config, lock, "textbooks")}
    lines = [line.split() for line in as_table(funnel).splitlines()]
    assert lines[1:] == [
        ["textbooks", "kept", "3", "75.00", "%"],
        ["too_short", "1", "25.00", "%"],
        ["all", "rows", "4"],
    ]
    assert as_json(funnel)["textbooks"]["share_kept"] == 0.75


def test_source_that_keeps_too_little_over_all_its_files_is_refused(root, one_source):
    config, lock = one_source("textbooks", [GOOD] * 2 + [SHORT] * 8, [SHORT] * 50, min_share_kept=0.1)
    do(root, config, lock)
    with pytest.raises(SourceError, match=r"textbooks \(2 of 2 files\): 2 of 60 rows kept"):
        require_source_kept(root, config, lock, "textbooks")


def test_source_without_a_row_in_any_file_is_refused_once_all_are_filtered(root, one_source, tmp_path):
    no_rows = pa.table({"text": pa.array([], pa.string())})
    config, lock = one_source("textbooks", [GOOD], [GOOD])
    do(root, config, lock)
    require_source_kept(root, config, lock, "textbooks")
    (tmp_path / "empty" / "textbooks").mkdir(parents=True)
    for file in lock.files("textbooks"):
        pq.write_table(no_rows, tmp_path / "empty" / "textbooks" / f"{file.key}.parquet")
    lock = lock_folder(root, config, tmp_path / "empty")
    do(root, config, lock, ("textbooks", "00000"))
    require_source_kept(root, config, lock, "textbooks")
    do(root, config, lock, ("textbooks", "00001"))
    with pytest.raises(SourceError, match="textbooks: its 2 files hold no row"):
        require_source_kept(root, config, lock, "textbooks")
