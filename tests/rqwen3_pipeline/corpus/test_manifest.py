import json
from fractions import Fraction

import numpy as np
import pyarrow.parquet as pq
import pytest

from model.errors import CorpusError
from model.files import sha256_file
from model.order import WindowLayout
from model.shard_format import docs_path, open_shard, read_manifest
from rqwen3_pipeline.corpus.build import build_corpus
from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.corpus.manifest import budgets, fold_manifest
from rqwen3_pipeline.settings import SOURCES

from .made import tree


def read(root):
    return json.loads(root.manifest.read_text())


def test_manifest_agrees_with_the_files(root, config, built):
    manifest, lock = read(root), read_lock(root)
    assert manifest["format_version"] == 1
    assert manifest["lock_sha256"] == sha256_file(root.lock)
    assert manifest["tokenizer"]["sha256"] == sha256_file(root.tokenizer)
    assert list(manifest["sources"]) == list(SOURCES)
    order = [(s["source"], s["partition"], s["part"]) for s in manifest["shards"]]
    assert order == sorted(order, key=lambda place: (SOURCES.index(place[0]), *place[1:]))
    on_disk = {path.relative_to(root.path).as_posix() for path in root.tokens.rglob("*.bin")}
    assert {s["path"] for s in manifest["shards"] + manifest["heldout"]} == on_disk
    for shard in manifest["shards"] + manifest["heldout"]:
        path = root.path / shard["path"]
        table = pq.read_table(docs_path(path))
        assert (sha256_file(path), path.stat().st_size) == (shard["sha256"], 4 * shard["tokens"])
        assert (table.num_rows, int(table.column("end")[-1].as_py())) == (shard["documents"], shard["tokens"])
    for source, facts in manifest["sources"].items():
        shards = [s for s in manifest["shards"] if s["source"] == source]
        assert facts["tokens"] == sum(s["tokens"] for s in shards)
        assert facts["tokens_used"] == sum(s["tokens_used"] for s in shards) <= facts["budget_tokens"]
        assert facts["rows"] == sum(facts["funnel"].values()) == sum(file.rows for file in lock.files(source))
        assert facts["kept"] == facts["documents"] + facts["heldout_documents"] + facts["shadowed"]
        assert facts["missing_tokens"] == facts["budget_tokens"] - facts["tokens_used"]
        assert facts["met"] == (facts["missing_tokens"] == 0)
    assert manifest["sources"]["fineweb_edu"]["shadowed"] == 3
    assert manifest["settings"]["filtered"]["fineweb_edu"]["score_column"] == "score"


def test_manifest_names_no_place_on_this_machine(root, folder, built):
    text = root.manifest.read_text()
    assert str(root.path) not in text
    assert str(folder) not in text


def test_manifest_stops_to_the_token_and_says_where(root, config, training, built):
    manifest = read(root)
    for source, facts in manifest["sources"].items():
        if not facts["met"]:
            assert facts["stopped_at"] is None
            continue
        stop = facts["stopped_at"]
        table = pq.read_table(docs_path(root.path / stop["shard"])).to_pylist()
        document = table[stop["document"]]
        assert document["end"] - document["tokens"] < stop["tokens_used"] <= document["end"]
        assert document["row"] == stop["row"]
        assert stop["cut_tokens"] == document["end"] - stop["tokens_used"]
        used = [s for s in manifest["shards"] if s["source"] == source and s["tokens_used"]]
        assert used[-1]["path"] == stop["shard"]
    assert any(facts["met"] for facts in manifest["sources"].values())


def test_manifest_reads_back_as_the_trainer_sees_it(root, training, built):
    manifest = read_manifest(root.manifest)
    shards = [open_shard(root.path, entry) for entry in manifest.shards]
    assert sum(map(len, shards)) == built["tokens_used"]
    assert max(int(shard.max()) for shard in shards if len(shard)) < manifest.vocab_size
    heldout = np.concatenate([open_shard(root.path, entry) for entry in manifest.heldout])
    assert int((heldout == manifest.eos_id).sum()) == built["heldout_documents"]


def test_manifest_twice_touches_nothing(root, config, training, folder, built):
    before = {path: path.stat().st_mtime_ns for path in root.path.rglob("*") if path.is_file()}
    assert build_corpus(root, config, training, folder) == built
    assert {path: path.stat().st_mtime_ns for path in root.path.rglob("*") if path.is_file()} == before


def test_manifest_of_a_budget_that_is_not_met_says_what_is_missing(root, config, built):
    budget = dict.fromkeys(config.sources, 10**6)
    report = fold_manifest(root, config, read_lock(root), budget)
    for facts in report["sources"].values():
        assert (facts["met"], facts["tokens_used"], facts["stopped_at"]) == (False, facts["tokens"], None)
        assert facts["missing_tokens"] == 10**6 - facts["tokens"]


@pytest.mark.parametrize("victim", ["bin", "json", "stamp.json"])
def test_manifest_over_a_missing_piece_is_refused(root, config, training, built, victim):
    path = root.tokens / ("pes2o-00000.stamp.json" if victim == "stamp.json" else f"pes2o-00000-00.{victim}")
    path.unlink()
    before = tree(root)
    with pytest.raises(CorpusError, match=r"pes2o.*rqwen3 corpus build"):
        fold_manifest(root, config, read_lock(root), budgets(config, training))
    assert tree(root) == before


def test_manifest_over_a_changed_sidecar_is_refused(root, config, training, built):
    path = root.tokens / "pes2o-00000-00.json"
    path.write_text(
        path.read_text().replace('"tokens": ', '"tokens":  ', 1).replace('"tokens":  ', '"tokens": ', 1)[:-1]
    )
    with pytest.raises(CorpusError, match=r"pes2o"):
        fold_manifest(root, config, read_lock(root), budgets(config, training))


def test_budgets_are_shares_and_give_windows_for_every_step(make_config, training):
    config = make_config(fineweb_edu={"share": 0.7}, wikipedia={"share": 0.1}, pes2o={"share": 3.3})
    budget = budgets(config, training)
    whole = sum(Fraction(str(source.share)) for source in config.sources.values())
    for name, source in config.sources.items():
        exact = Fraction(str(source.share)) / whole * training.max_steps * training.tokens_per_step
        assert 0 <= budget[name] - exact - training.seq_len - 1 < 1
    layout = WindowLayout(list(budget), list(budget.values()), training.seq_len)
    assert layout.total >= training.max_steps * training.sequences_per_step
