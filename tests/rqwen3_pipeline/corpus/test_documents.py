import json
import subprocess
import sys
import unicodedata
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from model.errors import SourceError
from rqwen3_pipeline.corpus import documents
from rqwen3_pipeline.corpus import text as text_module
from rqwen3_pipeline.corpus.documents import check_file, read_documents
from rqwen3_pipeline.corpus.stackexchange import LONGEST_BODY_BYTES
from rqwen3_pipeline.corpus.text import nfc, repair

from .made import answer, prose, question, unchecked, write


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
        (b"\xff\xed\xa0\xbd\xed\xb1\x8d\xed\xa0\xbd!", "\ufffd👍\ufffd!", True),
        (b"\xed\xa0", "\ufffd\ufffd", True),
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


PARTS = [
    "e",
    "\u0301",
    "\u0323",
    "a",
    " ",
    "\u1112",
    "\u1161",
    "\u11ab",
    "数",
    "\uac00",
    "\u0344",
    "é",
    "я",
    "か",
    "\u3099",
]
PARTS += ["🦉", "\ufffd"]
WORDS = [part.encode() for part in PARTS] + [b"\xff", b"\xed\xa0\xbd", b"\xf0\x9f"]


@given(st.lists(st.sampled_from(WORDS), max_size=60), st.integers(1, 9))
def test_clean_of_a_long_text_in_parts_is_that_of_the_whole(parts, size):
    raw = b"".join(parts)
    whole, put_in = repair(raw)
    text = normalizers.NFC().normalize_str(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_PART_BYTES", size)
        for given_as in (raw, memoryview(raw)):
            assert text_module.clean(given_as) == (text.encode(), len(text), put_in)


def test_clean_cuts_only_before_characters_that_never_combine_with_what_stands_before():
    def cuts(char):
        return text_module._CUT.match(char.encode("utf-8", "surrogatepass")) is not None

    pairs = [unicodedata.decomposition(chr(code)).split() for code in range(sys.maxunicode + 1)]
    second = {chr(int(pair[1], 16)) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")}
    jamo = {chr(code) for code in range(0x1160, 0x1200)}
    cut = [chr(code) for code in range(sys.maxunicode + 1) if cuts(chr(code))]
    assert len(cut) > 30_000
    assert [char for char in cut if unicodedata.combining(char) or char in second | jamo] == []


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=60))
def test_nfc_run_by_run_is_that_of_the_whole(parts):
    text = "".join(parts)
    assert nfc(text) == normalizers.NFC().normalize_str(text)


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


@pytest.mark.parametrize(
    ("value", "shown"),
    [("good", "'good'"), ("3,5", "'3,5'"), ("0x1", "'0x1'"), ("1_0", "'1_0'"), (True, "bool")],
)
def test_read_words_for_a_score_names_the_column(tmp_path, config, value, shown):
    path = write(tmp_path / "x.parquet", [{"text": "t", "score": value}])
    with pytest.raises(SourceError, match=rf"column 'score' is of type (string|bool), not a number.*{shown}|{shown}"):
        list(read_documents(path, "fineweb_edu", config))


SCORES = [
    (pa.array([2.9, 3.0, None, float("nan"), float("inf")]), [2.9, 3.0, None, None, None]),
    (pa.array([3.0, 2.75], pa.float32()), [3.0, 2.75]),
    (pa.array([2, 3, None]), [2.0, 3.0, None]),
    (pa.array([Decimal("2.99"), Decimal("3.00")]), [2.99, 3.0]),
    (pa.array(["2.99", " 3 ", "+3.5e0", ".5", "3.", "-1"]), [2.99, 3.0, 3.5, 0.5, 3.0, -1.0]),
    (pa.array(["", "  ", "NaN", "None", "null", None], pa.large_string()), [None] * 6),
    (pa.array([b"3.25", None]), [3.25, None]),
    (pa.array(["3.5", "2", "3.5"]).dictionary_encode(), [3.5, 2.0, 3.5]),
    (pa.nulls(2), [None, None]),
]


@pytest.mark.parametrize(("column", "scores"), SCORES, ids=lambda value: str(getattr(value, "type", "")))
def test_read_scores_of_every_type_by_one_rule(tmp_path, config, column, scores):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["t"] * len(column), "score": column}), path)
    assert [document.score for document in read_documents(path, "fineweb_edu", config)] == scores


def test_read_two_score_columns_takes_the_one_that_is_configured(tmp_path, config):
    path = write(tmp_path / "x.parquet", [{"int_score": 3, "text": "t", "score": 2.6}])
    assert [document.score for document in read_documents(path, "fineweb_edu", config)] == [2.6]
    other = write(tmp_path / "y.parquet", [{"int_score": 3.0, "text": "t"}])
    with pytest.raises(SourceError, match="lacks the column 'score'; it has int_score, text"):
        list(read_documents(other, "fineweb_edu", config))


def test_read_bytes_for_a_boolean_and_an_id_as_words(tmp_path, config):
    rows = [{"answer_id": b"9", "pm_score": "1", "selected": b"False", "text": "low"}]
    rows += [{"answer_id": b"10", "pm_score": "7", "selected": b"False", "text": "high"}]
    path = write(tmp_path / "s.parquet", [{"qid": 1, "question": "Q", "answers": rows}])
    assert [d.text for d in read_documents(path, "stackexchange", config)] == ["Q\n\nhigh"]


def test_read_one_row_of_forty_megabytes_between_others(tmp_path, config):
    fat = "the café " * 4_500_000
    path = write(tmp_path / "x.parquet", [{"text": "before"}, {"text": fat}, {"text": "after"}])
    assert [len(document.text) for document in read_documents(path, "textbooks", config)] == [6, len(fat), 5]


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lambda data: b"", "0 bytes"),
        (lambda data: data[: len(data) // 2], "not a whole parquet file"),
        (lambda data: data[:-1], "not a whole parquet file"),
        (lambda data: b"\x1f\x8b" + data[2:-4] + b"gzip", "not a whole parquet file"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "not a whole parquet file"),
    ],
    ids=["empty", "half", "last byte", "foreign", "footer too long"],
)
def test_read_what_is_no_whole_parquet_file_names_it_and_its_size(tmp_path, config, damage, seen):
    path = write(tmp_path / "x.parquet", [{"text": prose(i)} for i in range(40)])
    path.write_bytes(damage(path.read_bytes()))
    for use in (lambda: check_file(path, "textbooks", config), lambda: list(read_documents(path, "textbooks", config))):
        with pytest.raises(SourceError, match=rf"x\.parquet: .*{seen}"):
            use()


def test_read_questions_whose_answers_have_other_names_names_what_is_missing(tmp_path, config):
    renamed = write(tmp_path / "s.parquet", [{"qid": 1, "question": "Q", "responses": [{"body": "a", "score": 1}]}])
    with pytest.raises(SourceError, match=r"s\.parquet: lacks the column 'answers'; it has qid, question, responses"):
        check_file(renamed, "stackexchange", config)
    inside = write(
        tmp_path / "t.parquet", [{"question": "Q", "answers": [{"answer_id": 1, "body": "a", "pm_score": 1}]}]
    )
    for use in (check_file, lambda *arguments: list(read_documents(*arguments))):
        with pytest.raises(SourceError, match=r"t\.parquet: column 'answers' lacks the field 'selected'"):
            use(inside, "stackexchange", config)


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


BAD = b"bad \xed\xa0\xbd"
OFFSETS = pa.array([0, 1, 2], pa.int32())
PLAIN = {
    "answer_id": pa.array([1, 2]),
    "pm_score": pa.array([1, 2]),
    "selected": pa.array([True, True]),
    "text": pa.array(["an answer"] * 2),
}


def thread(path, metadata=None, **fields):
    """Two questions with an answer each, of which some columns are as given."""
    answers = pa.StructArray.from_arrays(list((PLAIN | fields).values()), names=list(PLAIN))
    columns = {"qid": ["7", "8"], "question": ["Q", "R"], "answers": pa.ListArray.from_arrays(OFFSETS, answers)}
    pq.write_table(pa.table(columns | ({} if metadata is None else {"metadata": metadata})), path)
    return path


@pytest.mark.parametrize("field", ["answer_id", "selected"])
def test_read_questions_with_one_answer_whose_field_is_no_utf8_repairs_it(tmp_path, config, field):
    path = thread(tmp_path / "s.parquet", **{field: unchecked(BAD, b"1")})
    assert [d.text for d in read_documents(path, "stackexchange", config)] == ["Q\n\nan answer", "R\n\nan answer"]


@pytest.mark.parametrize("kind", [pa.date32(), pa.list_(pa.string())], ids=str)
def test_read_questions_whose_answers_have_an_unusable_id_names_the_column(tmp_path, config, kind):
    path = thread(tmp_path / "s.parquet", answer_id=pa.nulls(2, kind))
    with pytest.raises(SourceError, match=r"s\.parquet: column 'answers\.answer_id' is of type .*, not text"):
        list(read_documents(path, "stackexchange", config))


ADDRESSES = [
    (pa.ListArray.from_arrays(OFFSETS, unchecked(BAD, b"http://e.org")), ["bad \ufffd", "http://e.org"]),
    (pa.LargeListArray.from_arrays(OFFSETS.cast(pa.int64()), unchecked(b"a", BAD)), ["a", "bad \ufffd"]),
    (pa.array([[b"http://e.org", b"other"], []], pa.list_(pa.binary())), ["http://e.org", ""]),
    (pa.array([[None, "other"], None]), ["", ""]),
    (pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string(), 2)), ["a", "c"]),
    (pa.array([["a"], ["b"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))), ["a", "b"]),
    (unchecked(BAD, b"http://e.org"), ["bad \ufffd", "http://e.org"]),
    (pa.StructArray.from_arrays([unchecked(BAD, b"a")], names=["a"]), ["", ""]),
    (pa.array([1, 2]), ["", ""]),
    (pa.nulls(2), ["", ""]),
]


@pytest.mark.parametrize(("column", "urls"), ADDRESSES, ids=lambda value: str(getattr(value, "type", "")))
def test_read_questions_with_metadata_of_every_type_by_one_rule(tmp_path, config, column, urls):
    path = thread(tmp_path / "s.parquet", metadata=column)
    assert [d.url for d in read_documents(path, "stackexchange", config)] == urls


def test_read_a_score_too_large_for_a_float_takes_the_nearest(tmp_path, config):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"], "score": pa.array([2**62 + 1])}), path)
    assert [d.score for d in read_documents(path, "fineweb_edu", config)] == [2.0**62]


def test_read_a_column_that_is_there_twice_names_it(tmp_path, config):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), path)
    for read in (check_file, lambda *given: list(read_documents(*given))):
        with pytest.raises(SourceError, match=r"x\.parquet: has 2 columns 'text'"):
            read(path, "textbooks", config)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null())], ids=str)
def test_read_questions_of_a_file_without_any_answer(tmp_path, config, kind):
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"question": ["q", "r"], "answers": pa.nulls(2, kind)}), path)
    assert [d.defect for d in read_documents(path, "stackexchange", config)] == ["no_answer"] * 2


def test_read_questions_and_answers_too_long_to_be_posts(tmp_path, config):
    long = "<p>x</p>" * (LONGEST_BODY_BYTES // 8 + 1)
    rows = [
        question(1, long, [answer(1, "a")]),
        question(2, "Q", [answer(1, long, 9, True), answer(2, "short")]),
        question(3, "Q", [answer(1, long, 9, True)]),
    ]
    found = list(read_documents(write(tmp_path / "s.parquet", rows), "stackexchange", config))
    assert [(d.text, d.defect) for d in found] == [("", "too_long"), ("Q\n\nshort", ""), ("", "no_answer")]


def test_read_batches_never_decode_more_than_they_may(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    sizes = [10, 10, 50_000, 50_000, 10, 10] * 30
    for use_dictionary in (True, False):
        text = pa.table({"text": ["x" * size for size in sizes], "other": ["y" * 1000] * len(sizes)})
        pq.write_table(text, path, row_group_size=100, use_dictionary=use_dictionary)
        monkeypatch.setattr(documents, "BATCH_BYTES", 120_000)
        with pq.ParquetFile(path) as file:
            batches = list(documents.read_batches(path, file, ["text"]))
        assert sum(batch.num_rows for batch in batches) == len(sizes)
        assert max(batch.nbytes for batch in batches) <= 120_000
        assert max(batch.num_rows for batch in batches) <= documents.BATCH_ROWS


MEASURE = """
import json, sys
from pathlib import Path
from rqwen3_pipeline.corpus.documents import read_documents
from rqwen3_pipeline.corpus.sources import COLUMNS, DEFAULTS, CorpusConfig, SourceConfig, TokenizerConfig
sources = {"textbooks": SourceConfig(**DEFAULTS["textbooks"])}
config = CorpusConfig(sources=sources, tokenizer=TokenizerConfig(), embedding_rows=9)
peaks = []
for row, _ in enumerate(read_documents(Path(sys.argv[1]), "textbooks", config)):
    if row % 1000 == 999:
        peaks.append(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
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
