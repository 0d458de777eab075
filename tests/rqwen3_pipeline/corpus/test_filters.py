import itertools
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.errors import SourceError
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.documents import Document
from rqwen3_pipeline.corpus.filters import LENGTH_EDGES, RULES, filter_file, is_disambiguation
from rqwen3_pipeline.corpus.funnel import source_funnel
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.corpus.text import nfc

from .made import only, prose, write


def judge(config, source, text, **fields):
    document = Document(row=0, id="", url="", data=text.encode(), chars=len(text), **fields)
    return RULES[source](document, config.sources[source])


@pytest.mark.parametrize(
    ("source", "shortest"),
    [("fineweb_edu", 100), ("wikipedia", 500), ("openwebmath", 200), ("pes2o", 1000), ("textbooks", 100)],
)
def test_rule_keeps_from_the_shortest_length_on(config, source, shortest):
    assert judge(config, source, "é" * shortest, score=3.0) == (True, "kept")
    assert judge(config, source, "é" * (shortest - 1), score=3.0) == (False, "too_short")


def test_rule_of_fineweb_edu_drops_above_the_longest(config):
    assert judge(config, "fineweb_edu", "x" * 100_000, score=3.0) == (True, "kept")
    assert judge(config, "fineweb_edu", "x" * 100_001, score=3.0) == (False, "too_long")


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (2.49, "low_score"),
        (2.999, "low_score"),
        (3.0, "kept"),
        (5.3, "kept"),
        (None, "no_score"),
        (math.nan, "no_score"),
    ],
)
def test_rule_of_fineweb_edu_takes_the_float_score(config, score, reason):
    assert judge(config, "fineweb_edu", "x" * 200, score=score) == (reason == "kept", reason)


@pytest.mark.parametrize("text", ["", " \n\t" * 500, "\u200b" * 2000, "\ufeff \u00a0" * 900])
def test_rule_drops_blank_text(config, text):
    assert judge(config, "textbooks", text) == (False, "blank")


LIST = "\n".join(f"Ada {i}, a place" for i in range(40))
LONG = "It is a large genus of plants with many species all over the world. " * 12


@pytest.mark.parametrize(
    ("title", "text", "points"),
    [
        ("Mercury (disambiguation)", LONG, True),
        ("Ada", f"Ada may refer to:\n\n{LIST}", True),
        ("22", f"22 may also  refer to:\n\n{LIST}", True),
        ("Austin", f"Austin is the capital of Texas.\n\nAustin may also refer to:\n\nPlaces\n\n{LIST}", True),
        ("Alex", f"Alex is the name of:\n\n{LIST}", True),
        ("Mercury", f"Mercury most commonly refers to:\n\n{LIST}", True),
        ("Ada", f"ADA can stand for any of the following:\n{LIST}", True),
        ("Ada", f"Ada may refer to\n\n{LIST}", True),
        ("Taraxacum", f"Dandelion redirects here. It may refer to any species of the genus. Taraxacum {LONG}", False),
        ("Democracy", f"Democracy may refer to:\n\n{LONG}\n\n{LONG}\n\n{LONG}", False),
        ("Word-sense disambiguation", f"Word-sense disambiguation is the task of choosing a sense. {LONG}", False),
        ("Reference", f"A reference is a relation in which one object refers to another. {LONG}", False),
        ("List of rivers", f"This is a list of rivers:\n{LIST}", False),
        ("Late", f"{LONG}\n\n{LONG}\n\n{LONG}\n\nIt may refer to:\n{LIST}", False),
    ],
)
def test_disambiguation_is_told_by_title_or_lead(title, text, points):
    assert is_disambiguation(title, text) is points


@pytest.fixture
def filtered(root, one_source):
    def run(source, *files, key="00000", **data):
        config, lock = one_source(source, *files, **data)
        for file in lock.files(source):
            assert run_stage("raw", root, config, lock, [(source, file.key)])[0].error is None
        return filter_file(root, config, lock, source, key)

    return run


def test_filter_counts_a_funnel_and_writes_what_is_kept(root, filtered):
    rows = [{"text": prose(i, 60) if i % 3 else "short"} for i in range(60)] + [{"text": None}, {"text": "  "}]
    rows[4]["text"] += "e\u0301"
    report = filtered("textbooks", rows)
    kept = [i for i in range(60) if i % 3]
    assert report["funnel"] == {"kept": 40, "too_short": 20, "null_text": 1, "blank": 1}
    assert (report["rows"], report["kept"], report["repaired"]) == (62, 40, 0)
    table = pq.read_table(root.filtered("textbooks", "00000"))
    assert [(f.name, f.type) for f in table.schema][:1] == [("row", pa.uint32())]
    assert table.column_names == ["row", "id", "url", "text"]
    assert table.column("row").to_pylist() == kept
    texts = table.column("text").to_pylist()
    assert texts[2].endswith("é")
    assert report["kept_chars"] == sum(map(len, texts))
    edges = [*LENGTH_EDGES, math.inf]
    counts = [sum(low <= len(t) < high for t in texts) for low, high in itertools.pairwise(edges)]
    assert report["length_histogram"] == {"edges": list(LENGTH_EDGES), "counts": counts}


def test_filter_counts_repaired_documents(filtered):
    rows = [{"text": prose(i).encode() + (b"\xed\xa0\xbd" if i == 2 else b"")} for i in range(5)]
    assert filtered("textbooks", rows)["repaired"] == 1


@pytest.mark.parametrize("rows", [1, 150])
def test_filter_that_keeps_too_little_of_a_source_is_refused_and_leaves_nothing(root, filtered, rows):
    with pytest.raises(SourceError, match=rf"0 of {rows} rows kept, less than .*no_score {rows}"):
        filtered(
            "fineweb_edu", [{"text": prose(1), "score": None}] * (rows - 1) + [{"text": "x", "score": float("nan")}]
        )
    assert list(root.filtered("fineweb_edu", "00000").parent.glob("*")) == []
    assert list(root.filtered("fineweb_edu", "00000").parent.glob(".*")) == []


def test_filter_of_one_small_file_of_several_may_keep_nothing(filtered):
    good, bad = [{"text": prose(i)} for i in range(5)], [{"text": None}] * 2
    kept = sorted(filtered("textbooks", good, bad, key=key)["kept"] for key in ("00000", "00001"))
    assert kept == [0, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_filter_of_files_some_of_which_hold_only_nulls_keeps_the_others_in_any_order(root, tmp_path, config, order):
    texts = [[prose(1), prose(2)], [None, None], [prose(5), None, prose(7)]]
    for name, i in enumerate(order):
        path = tmp_path / "one" / "textbooks" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = pa.null() if i == 1 else pa.large_string() if i == 2 else pa.string()
        pq.write_table(pa.table({"text": pa.array(texts[i], kind)}), path)
    alone = corpus_config(only("textbooks", {}, {}))
    lock = lock_folder(root, alone, tmp_path / "one")
    for stage in ("raw", "filtered"):
        outcomes = run_stage(stage, root, alone, lock, items_of(stage, alone, lock))
        assert not [outcome.error for outcome in outcomes if outcome.error]
    found = source_funnel(root, alone, lock, "textbooks")
    assert found.funnel == {"kept": 4, "null_text": 3}
    kept = [pq.read_table(root.filtered("textbooks", f.key)).column("text") for f in lock.files("textbooks")]
    assert {text for column in kept for text in column.to_pylist()} == {nfc(prose(i)) for i in (1, 2, 5, 7)}


def test_filter_of_a_file_without_rows_is_a_success(filtered, tmp_path):
    schema = pa.schema([("text", pa.string())])
    write(tmp_path / "one" / "textbooks" / "empty.parquet", [], schema)
    good = [{"text": prose(i)} for i in range(5)]
    kept = sorted(filtered("textbooks", good, key=key)["rows"] for key in ("00000", "00001"))
    assert kept == [0, 5]


def test_filter_of_a_raw_file_that_was_damaged_after_it_was_fetched_is_refused(root, one_source):
    config, lock = one_source("textbooks", [{"text": prose(i)} for i in range(5)])
    run_stage("raw", root, config, lock, [("textbooks", "00000")])
    raw = root.raw("textbooks", lock.files("textbooks")[0].name)
    data = bytearray(raw.read_bytes())
    data[50] ^= 1
    raw.write_bytes(bytes(data))
    (outcome,) = run_stage("filtered", root, config, lock, [("textbooks", "00000")])
    assert "it is damaged; its stamp was removed" in outcome.error
    assert not root.filtered("textbooks", "00000").exists()
