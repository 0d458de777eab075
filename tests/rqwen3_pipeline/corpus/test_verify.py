"""Every promise of a corpus fails on a planted fault, names it, and says what repairs it."""

import dataclasses
import json
import shutil
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest

from model.errors import CorpusError
from model.files import read_json, write_json
from model.shard_format import docs_path, sidecar_path
from rqwen3_pipeline.corpus.build import build_corpus
from rqwen3_pipeline.corpus.data_card import card_path
from rqwen3_pipeline.corpus.promises import PROMISES
from rqwen3_pipeline.corpus.stamps import stamp_path, survivors_stamp_path, tokens_stamp_path
from rqwen3_pipeline.corpus.verify import first_difference, verify

from .faults import changed, restamp, with_column
from .made import tree

SOURCE = "pes2o"


@pytest.fixture
def shard(root, built):
    """The first shard of a source whose documents have no copies."""
    return root.tokens / f"{SOURCE}-00000-00.bin"


def broken(root, config, training, workers=1):
    found = verify(root, config, training, workers)
    assert list(found) == list(PROMISES)
    return {name: defects for name, defects in found.items() if defects}


def repair(root, config, training, folder, found):
    """Run the shell's part of each command that is named, then build, and see that all is as it was."""
    for defect in (defect for defects in found.values() for defect in defects):
        assert "rqwen3 corpus build" in defect or "rm -f" in defect, defect
        if "rm -f" in defect:
            subprocess.run(["bash", "-c", defect[defect.index("rm -f") :].partition(" && ")[0]], check=True)
    build_corpus(root, config, training, folder, rebuild=any("--rebuild" in str(defects) for defects in found.values()))


@pytest.fixture
def repaired(root, config, training, folder, clean):
    """Checks that what is named repairs what is broken, to the byte."""

    def check(found):
        repair(root, config, training, folder, found)
        assert broken(root, config, training) == {}
        assert tree(root) == tree(clean[0])

    return check


def test_verify_of_a_good_corpus_finds_nothing_whatever_the_threads(root, config, training, built):
    heard = []
    assert broken(root, config, training) == broken(root, config, training, workers=3) == {}
    verify(root, config, training, progress=heard.append)
    manifest = read_json(root.manifest)
    assert heard == [entry["path"] for entry in manifest["shards"] + manifest["heldout"]]


def test_verify_without_a_manifest_says_how_to_make_it(root, config, training, built):
    root.manifest.unlink()
    with pytest.raises(CorpusError, match="rqwen3 corpus build"):
        verify(root, config, training)


def swapped(data):
    return np.frombuffer(data, "<u4").astype(">u4").tobytes()


@pytest.mark.parametrize(
    ("damage", "promises"),
    [
        (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], {"hashes"}),
        (swapped, {"hashes", "ids", "end_of_text"}),
        (lambda data: np.frombuffer(data, "<u4").astype("<u2").tobytes(), {"hashes", "counts", "end_of_text"}),
        (lambda data: data + b"\0", {"hashes", "counts"}),
        (lambda data: data[:-400], {"hashes", "counts", "end_of_text"}),
        (lambda data: changed(data, 7, 1_000_000), {"hashes", "ids"}),
        (lambda data: data[:-400] + bytes(400), {"hashes", "end_of_text"}),
    ],
    ids=["one_bit", "big_endian", "uint16", "odd_bytes", "short", "id_too_big", "zero_tail"],
)
def test_shard_with_damaged_bytes_is_named_and_repaired(root, config, training, shard, repaired, damage, promises):
    shard.write_bytes(damage(shard.read_bytes()))
    found = broken(root, config, training)
    assert promises <= set(found)
    for name in promises:
        assert all(f"{SOURCE}-00000-00" in defect for defect in found[name])
    assert "tokenizer" not in found
    repaired(found)


@pytest.mark.parametrize("gone", ["bin", "json", "docs.parquet"])
def test_sidecar_without_its_shard_and_the_reverse_are_named_and_repaired(
    root, config, training, shard, repaired, gone
):
    shard.with_name(f"{SOURCE}-00000-00.{gone}").unlink()
    found = broken(root, config, training)
    (defect,) = found["files"]
    what = {"bin": "the shard is not there, its sidecar is", "json": "the sidecar is not there, its shard is"}
    assert what.get(gone, "the table is not there, its shard is") in defect
    repaired(found)


@pytest.mark.parametrize("name", [f"{SOURCE}-00000-99.json", f"{SOURCE}-00007-00.bin"])
def test_file_that_the_manifest_does_not_list_is_named_and_repaired(root, config, training, shard, repaired, name):
    shutil.copy(sidecar_path(shard), root.tokens / name)
    found = broken(root, config, training)
    assert list(found) == ["files"]
    assert ("has no shard" in found["files"][0]) == name.endswith("json")
    repaired(found)


def test_shards_of_a_source_that_the_profile_does_not_use_are_no_defect(root, config, training, built):
    manifest = read_json(root.manifest)
    for part in ("shards", "heldout"):
        manifest[part] = [entry for entry in manifest[part] if entry["source"] != SOURCE]
    write_json(root.manifest, manifest)
    assert "files" in broken(root, config, training)
    left = {name: source for name, source in config.sources.items() if name != SOURCE}
    assert "files" not in broken(root, dataclasses.replace(config, sources=left), training)


@pytest.mark.parametrize("which", [sidecar_path, docs_path])
def test_sidecar_or_table_altered_by_one_byte_is_named_and_repaired(root, config, training, shard, repaired, which):
    data = bytearray(which(shard).read_bytes())
    data[len(data) // 2] ^= 1
    which(shard).write_bytes(bytes(data))
    found = broken(root, config, training)
    assert str(which(shard)) in found["hashes"][0]
    repaired(found)


def test_tokenizer_other_than_the_shards_is_named_and_repaired(root, config, training, shard, repaired):
    root.tokenizer.write_bytes(root.tokenizer.read_bytes() + b"\n")
    found = broken(root, config, training)
    assert "the shards were made with" in found["tokenizer"][0]
    repaired(found)


def test_shard_made_with_another_tokenizer_is_named_and_repaired(root, config, training, shard, repaired):
    sidecar = read_json(sidecar_path(shard))
    write_json(sidecar_path(shard), sidecar | {"tokenizer_sha256": "0" * 64})
    found = broken(root, config, training)
    assert "made with tokenizer 000000000000…" in found["tokenizer"][0]
    repaired(found)


def test_id_beyond_the_tokenizer_is_named_though_every_hash_agrees(root, config, training, shard, repaired):
    shard.write_bytes(changed(shard.read_bytes(), 7, 400))
    restamp(root, SOURCE, shard)
    found = broken(root, config, training)
    assert set(found) == {"ids"}
    assert "holds the id 400; the tokenizer has 400" in found["ids"][0]
    repaired(found)


def test_end_of_text_that_is_missing_or_elsewhere_is_named_though_every_hash_agrees(
    root, config, training, shard, repaired
):
    ids_ = np.frombuffer(shard.read_bytes(), "<u4").copy()
    eos = read_json(root.manifest)["tokenizer"]["eos_id"]
    end = int(np.flatnonzero(ids_ == eos)[0])
    ids_[[end, end - 1]] = ids_[[end - 1, end]]
    shard.write_bytes(ids_.tobytes())
    restamp(root, SOURCE, shard)
    found = broken(root, config, training)
    assert set(found) == {"end_of_text"}
    assert "not where a document ends" in found["end_of_text"][0]
    ids_[end - 1] = 0
    shard.write_bytes(ids_.tobytes())
    restamp(root, SOURCE, shard)
    found = broken(root, config, training)
    count = int((ids_ == eos).sum())
    assert f"{count} end-of-text ids, {count + 1} documents" in found["end_of_text"][0]
    repaired(found)


def test_digest_that_is_there_twice_is_named_by_shard_and_document(root, config, training, shard, repaired):
    digests = pq.read_table(docs_path(shard)).column("digest").to_pylist()
    with_column(shard, "digest", [*digests[:-1], digests[2]])
    restamp(root, SOURCE, shard)
    found = broken(root, config, training)
    assert set(found) == {"unique"}
    place = f"tokens/{SOURCE}-00000-00.bin"
    assert f"{place} {len(digests) - 1} and {place} 2" in found["unique"][0]
    repaired(found)


def test_digest_that_wikipedia_and_fineweb_edu_share_is_named(root, config, training, built):
    web, pages = (root.tokens / f"{source}-00000-00.bin" for source in ("fineweb_edu", "wikipedia"))
    digests = pq.read_table(docs_path(web)).column("digest").to_pylist()
    with_column(web, "digest", [pq.read_table(docs_path(pages)).column("digest")[0].as_py(), *digests[1:]])
    found = broken(root, config, training)
    assert found["unique"][0].startswith("wikipedia_fineweb_edu: 1 documents are there twice")


@pytest.mark.parametrize("into_training", [True, False])
def test_held_out_document_in_training_or_the_reverse_is_named(root, config, training, shard, repaired, into_training):
    heldout = root.heldout / shard.name
    victim, other = (shard, heldout) if into_training else (heldout, shard)
    foreign = pq.read_table(docs_path(other)).column("digest")[0].as_py()
    with_column(victim, "digest", [foreign, *pq.read_table(docs_path(victim)).column("digest").to_pylist()[1:]])
    restamp(root, SOURCE, victim)
    found = broken(root, config, training)
    assert set(found) == {"heldout", "unique"}
    assert ("lie in training" if into_training else "are to be trained on") in found["heldout"][0]
    assert "1 documents" in found["heldout"][0]
    repaired(found)


def test_counts_that_disagree_are_named_by_who_says_what(root, config, training, shard, repaired):
    lengths = pq.read_table(docs_path(shard)).column("text_bytes").to_pylist()
    with_column(shard, "text_bytes", [lengths[0] + 3, *lengths[1:]])
    restamp(root, SOURCE, shard)
    found = broken(root, config, training)
    assert set(found) == {"counts"}
    assert f"the table has {sum(lengths) + 3} text_bytes, the manifest {sum(lengths)}" in found["counts"][0]
    repaired(found)


def test_budget_larger_than_the_corpus_says_how_much_there_is_and_what_to_add(
    root, config, make_config, training, folder, built
):
    longer = dataclasses.replace(training, max_steps=200)
    build_corpus(root, config, longer, folder)
    found = broken(root, config, longer)
    assert list(found) == ["budgets"]
    facts = read_json(root.manifest)["sources"]
    short = [name for name, source in facts.items() if not source["met"]]
    assert [defect.partition(":")[0] for defect in found["budgets"]] == short != []
    for name, defect in zip(short, found["budgets"], strict=True):
        assert f"wants {facts[name]['budget_tokens']:,} tokens, the corpus has {facts[name]['tokens']:,}" in defect
        assert f"{facts[name]['missing_tokens']:,} are missing" in defect
        assert "rqwen3 sources lock --folder DIR" in defect
    assert broken(root, make_config(allow_repeats=True), longer) == {}


@pytest.mark.parametrize("edit", ["tokens_used", "repaired", "format"])
def test_manifest_that_the_pieces_do_not_give_is_named_and_repaired(root, config, training, built, repaired, edit):
    manifest = read_json(root.manifest)
    if edit == "format":
        root.manifest.write_text(json.dumps(manifest))
    else:
        manifest["sources"][SOURCE][edit] = 1
        root.manifest.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    found = broken(root, config, training)
    assert (f"sources.{SOURCE}.{edit} is 1" if edit != "format" else "the layout") in found["manifest"][0]
    repaired(found)


@pytest.mark.parametrize("stage", ["filtered", "survivors", "tokens"])
@pytest.mark.parametrize("damage", [lambda data: data.replace(b": 1", b": 3"), lambda data: data[:100]])
def test_stamp_that_was_changed_is_named_and_repaired(root, config, training, shard, repaired, stage, damage):
    filtered = stamp_path(root.filtered(SOURCE, "00000"))
    places = {"filtered": filtered, "tokens": tokens_stamp_path(root, SOURCE, "00000")}
    path = places.get(stage, survivors_stamp_path(root, SOURCE))
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    found = broken(root, config, training)
    assert f"rm -f {path}" in found["manifest"][0]
    repaired(found)


def test_card_that_is_not_the_manifests_is_named_and_repaired(root, config, training, built, repaired):
    card_path(root).write_text("# mine")
    found = broken(root, config, training)
    assert list(found) == ["manifest"]
    repaired(found)


def test_manifest_of_other_settings_names_the_setting(root, make_config, training, built):
    found = broken(root, make_config(heldout_one_in=6), training)
    assert "can't be folded again" in found["manifest"][0]
    found = broken(root, make_config(oracle_documents=4), training)
    assert "settings.manifest.oracle_documents is 3, the pieces and the configuration give 4" in found["manifest"][0]


def test_verify_does_not_need_the_tokenizers_stamp_to_name_a_lost_tokenizer(root, config, training, built):
    root.tokenizer.unlink()
    stamp_path(root.tokenizer).unlink()
    found = broken(root, config, training)
    assert "not there" in found["tokenizer"][0]
    assert "manifest" in found


def test_first_difference_is_named_by_its_path():
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("a[1].b", "2", "3")
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == ("a[1]", "None", "2")
    assert first_difference({}, {"a": "x" * 100}) == ("a", "None", "x" * 60 + "…")
