import pyarrow.parquet as pq
import pytest

from model.files import read_json
from model.shard_format import docs_path
from rqwen3_pipeline.corpus.shares import NO_SITE, realised_shares, shortfalls, site_tokens

from .made import answer, prose, question
from .test_dedup import until_survivors


def test_tokens_by_site_equal_a_plain_loop_over_the_tables(root, built):
    manifest = read_json(root.manifest)
    entries = [entry for entry in manifest["shards"] if entry["source"] == "stackexchange"]
    assert manifest["sources"]["stackexchange"]["sites"] == {"example.org": sum(e["tokens_used"] for e in entries)}
    entries = [e | {"tokens_used": e["tokens"] - 100} for e in manifest["shards"] if e["source"] == "fineweb_edu"]
    expected = {}
    for entry in entries:
        for row in pq.read_table(docs_path(root.path / entry["path"])).to_pylist():
            used = min(row["tokens"], max(0, entry["tokens_used"] - row["end"] + row["tokens"]))
            host = row["url"].split("/")[2]
            expected[host] = expected.get(host, 0) + used
    assert site_tokens(root, entries) == expected == {"e.org": sum(e["tokens_used"] for e in entries)}
    pages = [entry for entry in manifest["shards"] if entry["source"] == "wikipedia"]
    assert list(site_tokens(root, pages)) == [NO_SITE]


def test_tokens_by_site_come_largest_first_and_without_those_the_budget_cut_off(root, one_source):
    from rqwen3_pipeline.corpus.build import items_of, run_stage
    from rqwen3_pipeline.corpus.manifest import fold_manifest
    from rqwen3_pipeline.corpus.tokenization import make_tokenizer

    rows = [question(i, f"<p>{prose(i)}</p>", [answer(i, f"<p>{prose(100 + i)}</p>", 1)]) for i in range(40)]
    for i, row in enumerate(rows):
        site = "a.example" if i < 10 else "b.example" if i < 35 else "c.example"
        row["metadata"] = [f"https://{site}/questions/{i}", f"https://{site}", ""]
    config, lock = one_source("stackexchange", rows)
    until_survivors(root, config, lock)
    make_tokenizer(root, config, lock, None)
    run_stage("tokens", root, config, lock, items_of("tokens", config, lock))
    whole = fold_manifest(root, config, lock, {"stackexchange": 10**6})["sources"]["stackexchange"]["sites"]
    assert list(whole) == ["b.example", "a.example", "c.example"]
    half = fold_manifest(root, config, lock, {"stackexchange": whole["a.example"] + 50})
    assert half["sources"]["stackexchange"]["sites"] == {"a.example": whole["a.example"], "b.example": 50}


def facts(**more):
    made = {"share": 1.0, "tokens_used": 100, "tokens": 100, "budget_tokens": 100, "missing_tokens": 0, "files": 2}
    return made | {"pin": None} | more


def test_realised_shares_are_of_the_tokens_used():
    records = realised_shares({"a": facts(share=3.0), "b": facts(tokens_used=300, sites={"x": 200, "y": 100})})
    assert [(r["source"], r["site"], r["wanted_percent"], r["realised_percent"]) for r in records] == [
        ("a", "", 75.0, 25.0),
        ("b", "", 25.0, 75.0),
        ("b", "x", None, 50.0),
        ("b", "y", None, 25.0),
    ]


@pytest.mark.parametrize(("pin", "way_out"), [(None, "lock --folder DIR"), ({}, "data.budget_margin to 1.58 times")])
def test_shortfall_says_how_much_there_is_and_what_to_add(pin, way_out):
    short = facts(budget_tokens=150, missing_tokens=50, pin=pin)
    found = shortfalls({"a": facts(), "b": short})
    assert list(found) == ["b"]
    for part in ("wants 150 tokens, the corpus has 100, in 2 files: 50 are missing", "about 1 more files", way_out):
        assert part in found["b"]
    assert "Add files" in shortfalls({"b": short | {"tokens": 0, "missing_tokens": 150}})["b"]
