"""Variations of an experiment over a real small corpus: what is shared, what is made anew, what is refused."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from model.config import load_run_config
from model.errors import ConfigError
from rqwen3_pipeline.corpus.build import build_corpus
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.evidence.comparison import places
from rqwen3_pipeline.experiments import variation
from rqwen3_pipeline.experiments.variation import changed_sections, make_variation
from rqwen3_pipeline.settings import RunRoot
from tests.rqwen3_pipeline.site import hashes


def vary(run, name: str, *settings: str):
    return make_variation(run.root, run.run, name, settings, "small")


def built_alone(run, config: Path, home: Path) -> RunRoot:
    """The same corpus, made from nothing."""
    new, root = load_run_config(config), RunRoot(home)
    build_corpus(root, corpus_config(new), new.training, run.sources)
    return root


def test_variation_of_training_alone_shares_the_run_root_and_changes_only_what_was_set(corpus_run):
    made = vary(corpus_run, "cooler", "training.learning_rate=5e-4")
    assert made.root == corpus_run.root.path
    new = load_run_config(made.config)
    assert (new.name, new.training.learning_rate) == ("cooler", 5e-4)
    assert new.model == corpus_run.run.model
    assert corpus_config(new) == corpus_config(corpus_run.run)


def test_variation_of_the_corpus_links_what_stays_the_same_and_builds_to_the_bytes_of_a_fresh_one(
    corpus_run, tmp_path_factory
):
    made = vary(corpus_run, "stricter", "data.fineweb_edu.min_score=3.9")
    assert made.root != corpus_run.root.path
    assert {stage: shared for stage, (shared, _) in made.shared.items()} == {
        "raw": 3, "filtered": 2, "digests": 2, "survivors": 1, "tokens": 0,
    }  # fmt: skip
    raw = next(made.root.glob("raw/wikipedia/*.parquet"))
    assert os.path.samefile(raw, corpus_run.root.path / raw.relative_to(made.root))  # noqa: PTH121
    before = hashes(corpus_run.root.path)
    new = load_run_config(made.config)
    build_corpus(RunRoot(made.root), corpus_config(new), new.training, None)
    alone = built_alone(corpus_run, made.config, tmp_path_factory.mktemp("alone"))
    assert RunRoot(made.root).manifest.read_bytes() == alone.manifest.read_bytes()
    assert hashes(corpus_run.root.path) == before


def test_variation_without_a_source_links_the_pieces_of_the_others(corpus_run, tmp_path_factory):
    made = vary(corpus_run, "no-papers", "data.pes2o=none")
    assert {stage: counts for stage, counts in made.shared.items() if stage != "tokens"} == {
        "raw": (2, 2), "filtered": (2, 2), "digests": (2, 2), "survivors": (1, 1),
    }  # fmt: skip
    new = load_run_config(made.config)
    build_corpus(RunRoot(made.root), corpus_config(new), new.training, None)
    alone = built_alone(corpus_run, made.config, tmp_path_factory.mktemp("alone"))
    assert RunRoot(made.root).manifest.read_bytes() == alone.manifest.read_bytes()


def test_variation_under_a_name_that_is_taken_is_refused(corpus_run):
    vary(corpus_run, "twice", "training.seed=2")
    with pytest.raises(ConfigError, match="there already"):
        vary(corpus_run, "twice", "training.seed=3")


@pytest.mark.parametrize("place", ["_share_piece", "save_lock", "write_text", "write_json", "fsync_folder"])
def test_variation_killed_anywhere_is_made_by_the_same_command_again(corpus_run, place):
    def make() -> None:
        vary(corpus_run, "stricter", "data.fineweb_edu.min_score=3.9")

    def killed() -> None:
        setattr(variation, place, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        make()

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    done = place == "fsync_folder"  # the last act
    assert list(places(corpus_run.root, "small")) == ["stricter"] * done
    if not done:
        make()
    assert list(places(corpus_run.root, "small")) == ["stricter"]
    assert list(corpus_run.root.path.parent.glob(".*.tmp")) == []


def test_variation_that_fails_leaves_nothing_in_the_way(corpus_run, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(corpus_run.root.path.parent.iterdir())
    monkeypatch.setattr(variation, "_share_piece", full)
    with pytest.raises(OSError, match="No space left"):
        vary(corpus_run, "stricter", "data.fineweb_edu.min_score=3.9")
    assert sorted(corpus_run.root.path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("training.learning_rat=1", "learning_rate"),
        ("learning_rate=1", "give section.key=value"),
        ("training.learning_rate", "give section.key=value"),
        ("training.learning_rate=fast", "learning_rate"),
        ("training.learning_rate.x=1", "is a value, not a section"),
        ("model.head_dim=7", "head_dim"),
        ("submissions.retries=-1", r"the new configuration: submissions\.retries = -1"),
        ("evaluation.items=0", r"the new configuration: evaluation\.items"),
        ("evaluation.expectations.arc.low=2", r"the new configuration: \[evaluation\.expectations\.arc\] lacks"),
        ("data.wikipedia.share=-1", r"the new configuration: data\.wikipedia\.share"),
    ],
)
def test_variation_with_an_impossible_setting_is_refused_and_nothing_is_written(corpus_run, setting, why):
    before = hashes(corpus_run.root.path)
    with pytest.raises(ConfigError, match=why):
        vary(corpus_run, "wrong", setting)
    assert hashes(corpus_run.root.path) == before
    assert not (corpus_run.root.path.parent / "wrong").exists()


def test_variation_under_an_odd_name_is_refused(corpus_run):
    with pytest.raises(ConfigError, match="name"):
        vary(corpus_run, "../up", "training.seed=2")


def test_changed_sections_leave_the_original_alone_and_take_every_kind_of_value():
    old = {"run": {"name": "a"}, "data": {"x": {"y": 1}}}
    new = changed_sections(old, "b", ["data.x.y=2.5", "data.x.list=[1, 2]", "data.x.flag=true", "data.x.word=plain"])
    assert new == {"run": {"name": "b"}, "data": {"x": {"y": 2.5, "list": [1, 2], "flag": True, "word": "plain"}}}
    assert old == {"run": {"name": "a"}, "data": {"x": {"y": 1}}}
