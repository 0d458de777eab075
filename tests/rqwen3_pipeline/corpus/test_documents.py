import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import SourceError
from rqwen3_pipeline.corpus.documents import check_file, nfc, read_documents, repair

from .made import answer, prose, question, write


@pytest.mark.parametrize(
    ("raw", "text", "repaired"),
    [
        ("plain", "plain", False),
        ("a \ud83d b", "a \ufffd b", True),
        ("\udc4d\ud83d", "\ufffd\ufffd", True),
        ("\ud83d\udc4d", "👍", False),
        ("was \ufffd before", "was \ufffd before", False),
        (b"\xed\xa0\xbd!", "\ufffd!", True),
        (b"\xed\xa0\xbd\xed\xb1\x8d", "👍", False),
        (b"ab\xff", "ab\ufffd", True),
        ("é".encode(), "é", False),
    ],
)
def test_repair_of_half_surrogates_and_bad_bytes(raw, text, repaired):
    assert repair(raw) == (text, repaired)


@given(st.text(st.characters(codec=None)))
def test_repair_always_gives_text_that_utf8_holds(text):
    fixed, changed = repair(text)
    fixed.encode()
    assert changed == (fixed.count("\ufffd") != text.count("\ufffd"))
    assert repair(fixed) == (fixed, False)


def test_nfc_composes():
    assert nfc("e\u0301 \u1112\u1161\u11ab") == "é 한"


KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_read_texts_of_every_type_alike(tmp_path, config, kind):
    texts = ["e\u0301ins", None, "", "drei"]
    path = tmp_path / "x.parquet"
    column = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts, kind)
    pq.write_table(pa.table({"extra": [1, 2, 3, 4], "content": column}), path)
    found = list(read_documents(path, "pes2o", config))
    assert [document.text for document in found] == ["éins", "", "", "drei"]
    assert [document.defect for document in found] == ["", "null_text", "", ""]
    assert [(d.row, d.id, d.url) for d in found] == [(i, f"x.parquet#{i}", "") for i in range(4)]


def test_read_a_column_that_is_null_throughout(tmp_path, config):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": pa.nulls(3)}), path)
    assert check_file(path, "textbooks", config) == 3
    assert [document.defect for document in read_documents(path, "textbooks", config)] == ["null_text"] * 3


def test_read_a_file_without_rows_gives_nothing(tmp_path, config):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert list(read_documents(path, "textbooks", config)) == []


def test_read_takes_id_and_url_by_name_in_any_order(tmp_path, config):
    rows = [{"score": 3, "url": "u", "zzz": 0, "text": "t", "id": "i"}, {"score": None, "url": None, "text": "t"}]
    found = list(read_documents(write(tmp_path / "f.parquet", rows), "fineweb_edu", config))
    assert [(d.id, d.url, d.score) for d in found] == [("i", "u", 3.0), ("f.parquet#1", "", None)]


def test_read_over_many_row_groups_counts_rows_through(tmp_path, config):
    path = write(tmp_path / "x.parquet", [{"text": prose(i)} for i in range(300)])
    found = list(read_documents(path, "textbooks", config))
    assert [document.row for document in found] == list(range(300))
    assert [document.text for document in found] == [nfc(prose(i)) for i in range(300)]


def test_read_a_number_for_text_names_the_column(tmp_path, config):
    path = write(tmp_path / "x.parquet", [{"text": 1.5}])
    with pytest.raises(SourceError, match=r"x\.parquet: column 'text' is of type double, not text"):
        list(read_documents(path, "textbooks", config))


def test_read_words_for_a_score_names_the_column(tmp_path, config):
    path = write(tmp_path / "x.parquet", [{"text": "t", "score": "good"}])
    with pytest.raises(SourceError, match=r"column 'score' is of type string, not a number"):
        list(read_documents(path, "fineweb_edu", config))


def test_read_a_file_with_a_hole_fails_where_it_is(tmp_path, config):
    path = tmp_path / "x.parquet"
    texts = pa.table({"text": [prose(i) for i in range(600)]})
    pq.write_table(texts, path, row_group_size=200, use_dictionary=False, compression="none")
    data = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[middle : middle + 4000] = bytes(4000)
    path.write_bytes(bytes(data))
    assert check_file(path, "textbooks", config) == 600
    with pytest.raises(SourceError, match=r"x\.parquet: damaged after row \d+ of 600, columns text"):
        list(read_documents(path, "textbooks", config))


def test_read_questions_composes_question_and_answer(tmp_path, config):
    rows = [
        question(7, "<p>Why?</p>", [answer(1, "<p>So.</p>", 1), answer(2, "<p>Chosen.</p>", 0, True)]),
        question(8, "<p>Nobody</p>", []),
        question(9, "<p>Null</p>", None),
        question(10, "<p>Holes</p>", [None, answer(3, None, 9, True), answer(4, "e\u0301", None, None)]),
    ]
    path = write(tmp_path / "s.parquet", rows)
    found = list(read_documents(path, "stackexchange", config))
    assert [(d.id, d.text, d.defect) for d in found] == [
        ("7", "Why?\n\nChosen.", ""),
        ("8", "", "no_answer"),
        ("9", "", "no_answer"),
        ("10", "Holes\n\né", ""),
    ]
    assert found[0].url == "https://example.org/questions/7"


def test_read_questions_whose_types_have_drifted(tmp_path, config):
    field = [
        ("answer_id", pa.string()),
        ("pm_score", pa.float64()),
        ("selected", pa.string()),
        ("text", pa.large_binary()),
    ]
    schema = pa.schema(
        [("qid", pa.string()), ("question", pa.large_string()), ("answers", pa.large_list(pa.struct(field)))]
    )
    answers = [
        {"answer_id": "10", "pm_score": 9.0, "selected": "False", "text": b"high"},
        {"answer_id": "9", "pm_score": 2.0, "selected": "True", "text": b"chosen \xed\xa0\xbd"},
    ]
    path = write(tmp_path / "s.parquet", [{"qid": "q", "question": "Q", "answers": answers}], schema)
    (found,) = read_documents(path, "stackexchange", config)
    assert (found.id, found.text, found.repaired) == ("q", "Q\n\nchosen \ufffd", True)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null())], ids=str)
def test_read_questions_of_a_file_without_any_answer(tmp_path, config, kind):
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"question": ["q", "r"], "answers": pa.nulls(2, kind)}), path)
    assert [d.defect for d in read_documents(path, "stackexchange", config)] == ["no_answer"] * 2


MEASURE = """
import json, resource, sys
from pathlib import Path
from rqwen3_pipeline.corpus.documents import read_documents
from rqwen3_pipeline.corpus.sources import COLUMNS, DEFAULTS, CorpusConfig, SourceConfig, TokenizerConfig
sources = {"textbooks": SourceConfig(**DEFAULTS["textbooks"])}
config = CorpusConfig(sources=sources, tokenizer=TokenizerConfig(), embedding_rows=9)
peaks = []
for row, _ in enumerate(read_documents(Path(sys.argv[1]), "textbooks", config)):
    if row % 1000 == 999:
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(json.dumps(peaks))
"""


def test_read_a_long_file_in_flat_memory(tmp_path):
    path = tmp_path / "big.parquet"
    text = [prose(i, 100) * 8 for i in range(100)]
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="zstd") as writer:
        for _ in range(5):
            writer.write_table(pa.table({"text": text * 8}), row_group_size=800)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    assert len(peaks) == 4
    assert peaks[-1] <= 1.2 * peaks[0], peaks
