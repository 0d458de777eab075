import json
import os

import pytest

from model.errors import CorpusError
from model.files import sha256_bytes, write_bytes
from rqwen3_pipeline.corpus import stamps


@pytest.fixture
def stamped(root):
    output = root.path / "filtered" / "web" / "00000.parquet"
    write_bytes(output, b"rows")
    stamps.write_stamp(
        root,
        stamps.stamp_path(output),
        stage="filtered",
        settings={"min_chars": 100, "deep": {"a": 1}},
        inputs={"raw/web/a.parquet": "00"},
        outputs=[output],
        report={"rows": 3},
    )
    return output


SETTINGS, INPUTS = {"min_chars": 100, "deep": {"a": 1}}, {"raw/web/a.parquet": "00"}


def test_stamp_says_what_was_made_from_what(root, stamped):
    data = json.loads(stamped.with_name("00000.stamp.json").read_text())
    assert data["outputs"] == {"filtered/web/00000.parquet": {"bytes": 4, "sha256": sha256_bytes(b"rows")}}
    assert set(data) == {"format_version", "stage", "settings", "settings_sha256", "inputs", "outputs", "report"}
    assert data["settings_sha256"] == sha256_bytes(b'{"deep":{"a":1},"min_chars":100}')


def test_current_with_the_same_settings_and_inputs_gives_the_report(root, stamped):
    stamp = stamps.current(root, stamps.stamp_path(stamped), SETTINGS, INPUTS)
    assert stamp is not None
    assert stamp.report == {"rows": 3}


def test_current_with_other_inputs_asks_for_work(root, stamped):
    assert stamps.current(root, stamps.stamp_path(stamped), SETTINGS, {"raw/web/a.parquet": "01"}) is None


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_current_with_a_damaged_output_asks_for_work(root, stamped, damage):
    os.truncate(stamped, 3) if damage == "cut" else stamped.unlink()
    assert stamps.current(root, stamps.stamp_path(stamped), SETTINGS, INPUTS) is None


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"min_chars": 200, "deep": {"a": 1}}, r"min_chars = 100, now min_chars = 200.*RQWEN3_HOME.*--rebuild"),
        ({"min_chars": 100, "deep": {"a": 2}}, r"deep\.a = 1, now deep\.a = 2"),
        ({"min_chars": 100}, r"deep = \{'a': 1\}, now deep = None"),
    ],
)
def test_current_with_other_settings_is_refused_by_name(root, stamped, now, message):
    with pytest.raises(CorpusError, match=message):
        stamps.current(root, stamps.stamp_path(stamped), now, INPUTS)
    assert stamps.current(root, stamps.stamp_path(stamped), now, INPUTS, rebuild=True) is None


def test_read_stamp_that_is_damaged_says_how_to_go_on(root, stamped):
    path = stamps.stamp_path(stamped)
    path.write_text(path.read_text()[:20])
    with pytest.raises(CorpusError, match="not valid JSON"):
        stamps.read_stamp(path)
    path.write_text('{"format_version": 1}')
    with pytest.raises(CorpusError, match="lacks 'stage'"):
        stamps.read_stamp(path)


def test_verify_inputs_finds_one_changed_bit(root, stamped):
    inputs = {"filtered/web/00000.parquet": sha256_bytes(b"rows")}
    stamps.verify_inputs(root, inputs)
    stamped.write_bytes(b"rowt")
    with pytest.raises(CorpusError, match=r"00000\.parquet: SHA-256 is .*damaged; its stamp was removed"):
        stamps.verify_inputs(root, inputs)
    assert stamped.read_bytes() == b"rowt"
    assert stamps.current(root, stamps.stamp_path(stamped), SETTINGS, INPUTS) is None


def test_verify_inputs_of_what_was_made_anew_meanwhile_leaves_its_stamp(root, stamped):
    with pytest.raises(CorpusError, match=r"00000\.parquet: SHA-256 is .*replaced it\. Run the same command again"):
        stamps.verify_inputs(root, {"filtered/web/00000.parquet": sha256_bytes(b"old")})
    assert stamps.current(root, stamps.stamp_path(stamped), SETTINGS, INPUTS) is not None


def test_begin_sweeps_this_output_and_no_other(root, stamped):
    mine, other = (stamped.with_name(f".{name}.77.tmp") for name in ("00000.parquet", "00001.parquet"))
    mine.touch()
    other.touch()
    stamps.begin(stamps.stamp_path(stamped), stamped)
    assert not mine.exists()
    assert other.exists()
    assert not stamps.stamp_path(stamped).exists()
