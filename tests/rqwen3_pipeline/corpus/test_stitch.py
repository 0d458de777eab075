"""Builds made in run roots of their own become one, byte for byte that of an undisturbed build."""

import shutil

import pytest

from model.errors import CorpusError
from model.files import read_json, write_json
from rqwen3_pipeline.corpus.build import BuildOptions, build_corpus, build_files, finish, items_of
from rqwen3_pipeline.corpus.lock import lock_folder, read_lock
from rqwen3_pipeline.corpus.sources import GROUPS, corpus_config
from rqwen3_pipeline.corpus.stamps import stamp_path, tokens_stamp_path
from rqwen3_pipeline.corpus.stitch import stitch
from rqwen3_pipeline.settings import RunRoot

from .made import run_config, tree, write


@pytest.fixture
def part(tmp_path, folder):
    """Build some files in a run root of their own."""

    def make(name, config, items=None, until="digests", tokenizer=None, source=folder):
        root = RunRoot(tmp_path / name)
        lock = lock_folder(root, config, source)
        wanted = [item for item in items_of("raw", config, lock) if items is None or items(item)]
        built = build_files(root, config, lock, wanted, BuildOptions(until=until, wait_s=0, tokenizer_file=tokenizer))
        assert not built.failed
        return root

    return make


def finished(root, config, training, others, tokenizer=None):
    taken = stitch(root, config, others)
    finish(root, config, read_lock(root), training, BuildOptions(wait_s=0, tokenizer_file=tokenizer))
    return taken


def test_digests_of_different_files_stitched_give_the_same_bytes(root, config, training, clean, part):
    """Files of one group in different roots: the survivors and tokens are made where they are stitched."""
    roots = [
        part("a", config, lambda item: item[1] == "00000" and item[0] != "wikipedia"),
        part("b", config, lambda item: item[1] == "00001"),
        part("c", config, lambda item: item[0] in ("wikipedia", "pes2o")),
    ]
    taken = finished(root, config, training, roots)
    assert taken == {"raw": 8, "filtered": 8, "digests": 8, "survivors": 0, "tokenizer": 0, "tokens": 0}
    assert tree(root) == tree(clean[0])


def test_groups_made_whole_in_different_roots_are_only_taken_over(
    root, make_config, pinned, training, folder, tmp_path, tokenizer_file, part
):
    config = make_config(**pinned)
    roots = [
        part(group, config, lambda item, members=members: item[0] in members, "tokens", tokenizer_file)
        for group, members in GROUPS.items()
    ]
    heard = []
    assert stitch(root, config, roots) == {
        "raw": 8,
        "filtered": 8,
        "digests": 8,
        "survivors": 5,
        "tokenizer": 1,
        "tokens": 8,
    }
    finish(root, config, read_lock(root), training, BuildOptions(progress=heard.append))
    assert all(outcome.skipped for outcome in heard)
    whole = RunRoot(tmp_path / "whole")
    build_corpus(whole, config, training, folder, tokenizer_file)
    assert tree(root) == tree(whole)


def test_stitch_into_a_root_that_has_some_takes_the_others_and_twice_nothing(root, config, training, clean, part):
    shutil.copytree(part("mine", config, lambda item: item[1] == "00000").path, root.path)
    other = part("other", config, lambda item: item[1] == "00001")
    assert finished(root, config, training, [other])["filtered"] == 2
    assert tree(root) == tree(clean[0])
    assert not any(stitch(root, config, [other, root]).values())


def test_stitch_copies_where_links_can_not_be_made(root, config, training, clean, part, monkeypatch):
    import os

    def refuse(*_args, **_named):
        raise OSError(18, "Invalid cross-device link")

    other = part("other", config)
    monkeypatch.setattr(os, "link", refuse)
    finished(root, config, training, [other])
    assert tree(root) == tree(clean[0])


def test_stitch_of_files_that_nobody_made_names_the_command(root, config, part):
    other = part("a", config, lambda item: item != ("fineweb_edu", "00001"))
    with pytest.raises(CorpusError, match=r"fineweb_edu/00001: its raw files .* --source fineweb_edu --files 1"):
        stitch(root, config, [other])


def test_stitch_of_another_lock_names_the_file(root, config, folder, tmp_path, part):
    shutil.copytree(folder, tmp_path / "old")
    write(tmp_path / "old" / "pes2o.parquet", [{"content": "other"}])
    roots = [part("a", config, until="raw"), part("b", config, until="raw", source=tmp_path / "old")]
    with pytest.raises(CorpusError, match=r"b: made from another lock .*: pes2o\.file 0 is 'pes2o\.parquet "):
        stitch(root, config, roots)


def test_stitch_of_pieces_with_other_settings_names_the_setting(root, config, make_config, part):
    other = part("a", make_config(textbooks={"min_chars": 110}))
    with pytest.raises(CorpusError, match=r"textbooks.*made with min_chars = 110, now min_chars = 100"):
        stitch(root, config, [other])


def test_stitch_of_a_manifest_with_other_settings_names_the_setting(root, make_config, clean):
    with pytest.raises(CorpusError, match=r"manifest\.json: made with tokenizer\.heldout_one_in = 5, now .* = 7"):
        stitch(root, make_config(heldout_one_in=7), [clean[0]])


def test_stitch_of_roots_with_different_tokenizers_is_refused(
    root, config, make_config, pinned, tokenizer_file, clean, part
):
    other = part("a", make_config(**pinned), lambda item: item[0] == "pes2o", "tokens", tokenizer_file)
    for mine in (config, make_config(**pinned)):
        with pytest.raises(CorpusError, match=r"a: its tokenizer\.json has SHA-256 .* that of .*clean"):
            stitch(root, mine, [clean[0], other])


def test_piece_that_two_roots_made_differently_is_refused(root, config, part):
    one, two = part("one", config), part("two", config)
    path = two.digests("pes2o", "00000")
    stamp = read_json(stamp_path(path))
    stamp["outputs"]["digests/pes2o/00000.npy"]["sha256"] = "0" * 64
    stamp.pop("facts_sha256", None)
    write_json(stamp_path(path), stamp)
    with pytest.raises(CorpusError, match=r"digests/pes2o/00000\.npy: of .*two.* 000000000000…, of .*"):
        stitch(root, config, [one, two])


def test_damaged_or_cut_pieces_are_not_taken(root, config, training, clean, part):
    good, bad = part("good", config), part("bad", config)
    bad.filtered("pes2o", "00000").write_bytes(b"cut")
    stamp_path(bad.digests("textbooks", "00000")).write_text("{")
    finished(root, config, training, [bad, good])
    assert tree(root) == tree(clean[0])


def test_stitch_without_a_lock_anywhere_says_so(root, config, tmp_path):
    with pytest.raises(CorpusError, match="no source lock"):
        stitch(root, config, [])
    with pytest.raises(CorpusError, match="no source lock"):
        stitch(root, corpus_config(run_config()), [RunRoot(tmp_path)])
    assert not tokens_stamp_path(root, "pes2o", "00000").exists()
