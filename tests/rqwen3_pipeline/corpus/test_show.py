import pyarrow as pa
import pytest

from model.errors import ConfigError, CorpusError
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.show import as_json, as_text, documents_dropped

from .made import answer, prose, question, unchecked


@pytest.fixture
def filtered(root, one_source):
    def run(source, *files, stages=("raw", "filtered"), **data):
        config, lock = one_source(source, *files, **data)
        for stage in stages:
            run_stage(stage, root, config, lock, items_of(stage, config, lock))
        return lambda reason, count: list(documents_dropped(root, config, lock, source, reason, count))

    return run


def rows(first):
    return [{"text": prose(i) if i % 3 == 0 else f"short {i}"} for i in range(first, first + 300)]


def test_show_gives_documents_of_that_reason_spread_over_all_files(filtered):
    show = filtered("textbooks", rows(0), rows(300))
    shown = show("too_short", 4)
    assert {item.reason for item in shown} == {"too_short"}
    assert all(item.document.text.startswith("short ") for item in shown)
    assert [item.file for item in shown] == ["00000", "00000", "00001", "00001"]
    assert [item.document.row for item in shown] == [76, 226, 76, 226]
    assert show("too_short", 4) == shown


def test_show_of_more_than_there_are_gives_all(filtered):
    show = filtered("textbooks", [*rows(0)[:10], {"text": None}])
    assert [item.document.row for item in show("too_short", 99)] == [1, 2, 4, 5, 7, 8]
    assert [item.document.row for item in show("kept", 99)] == [0, 3, 6, 9]


def test_show_of_a_reason_that_no_document_has_lists_those_there_are(filtered):
    show = filtered("textbooks", rows(0))
    with pytest.raises(ConfigError, match=r"--dropped-for too_long: no document of textbooks .*kept, too_short\."):
        show("too_long", 5)


def test_show_of_a_source_that_was_refused_judges_its_raw_file(filtered):
    show = filtered("textbooks", [{"text": "short"}] * 150)
    assert [item.document.row for item in show("too_short", 2)] == [37, 112]


def test_show_of_a_source_that_was_not_fetched_says_so(filtered):
    with pytest.raises(CorpusError, match="no file of textbooks is fetched yet"):
        filtered("textbooks", rows(0), stages=())("kept", 1)


def test_show_of_a_document_without_text_gives_the_raw_row(filtered):
    bare = question(7, "<p>Why?</p>", [answer(1, "<img src='x'>", 3)])
    good = [question(i, f"<p>{prose(i)}</p>", [answer(i, "<p>So.</p>", 1)]) for i in range(200)]
    show = filtered("stackexchange", [*good, bare])
    (item,) = show("no_answer", 5)
    assert item.raw["question"] == "<p>Why?</p>"
    assert "answers = [{'answer_id': 1" in as_text(item, chars=4000)
    assert as_json(item)["id"] == "7"


def test_show_of_a_raw_row_that_python_can_not_hold_gives_it_as_arrow_prints_it(filtered):
    columns = {
        "question": ["<p>Why?</p>"] * 3,
        "answers": pa.nulls(3),
        "site": unchecked(b"bad \xed\xa0\xbd", b"", b""),
    }
    show = filtered("stackexchange", pa.table(columns | {"asked": pa.array([2**62] * 3, pa.timestamp("us"))}))
    raw = show("no_answer", 5)[0].raw
    assert raw["question"] == "<p>Why?</p>"
    assert "bad \ufffd" in raw["site"]
    assert "out of range" in raw["asked"]


def test_show_as_text_cuts_long_documents_and_says_by_how_much(filtered):
    (item,) = filtered("textbooks", [{"text": "x" * 1000}])("kept", 1)
    text = as_text(item, chars=100)
    assert "textbooks/00000 row 0 · 1,000 characters · kept" in text
    assert "x" * 100 + " … and 900 characters more" in text
    assert "x" * 101 not in text
