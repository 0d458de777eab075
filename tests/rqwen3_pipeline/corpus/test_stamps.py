import contextlib
import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import CorpusError
from model.files import read_json, sha256_bytes, write_bytes, write_json
from rqwen3_pipeline.corpus import stamps
from rqwen3_pipeline.settings import RunRoot


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
    facts = {"stage", "settings", "inputs", "outputs", "report"}
    assert set(data) == facts | {"format_version", "settings_sha256", "facts_sha256"}
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


@given(place=st.integers(min_value=0), bit=st.integers(0, 7))
def test_read_stamp_with_a_flipped_bit_gives_the_same_facts_or_is_refused(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("stamp") / "00000.stamp.json"
    facts: dict[str, Any] = {"stage": "filtered", "settings": SETTINGS, "inputs": INPUTS, "report": {"rows": 3}}
    stamps.write_stamp(RunRoot(path.parent), path, **facts, outputs=[])
    whole, data = stamps.read_stamp(path), bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with contextlib.suppress(CorpusError):
        assert stamps.read_stamp(path) == whole


def test_read_stamp_of_an_earlier_version_needs_no_hash_of_its_facts(root, stamped):
    path = stamps.stamp_path(stamped)
    data = read_json(path)
    del data["facts_sha256"]
    write_json(path, data)
    assert stamps.current(root, path, SETTINGS, INPUTS) is not None


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
