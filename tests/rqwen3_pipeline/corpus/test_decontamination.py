import json
import os
import random
import re
import signal
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.benchmarks import BENCHMARKS
from model.errors import ConfigError, CorpusError
from rqwen3_pipeline.corpus import decontamination
from rqwen3_pipeline.corpus.build import build_corpus, pending, run_stage
from rqwen3_pipeline.corpus.decontamination import NGRAM_WORDS, Questions, scan_corpus, words_of
from rqwen3_pipeline.corpus.fetch import fetch_file
from rqwen3_pipeline.corpus.filters import filter_file
from rqwen3_pipeline.corpus.show import documents_dropped
from rqwen3_pipeline.corpus.sources import corpus_config

from .made import prose, run_config

QUESTION = "A student wants to know why the iron nail in the glass of salt water is brown after a week in the sun"
ARC = {"id": "q", "question": QUESTION, "choices": {"text": ["rust", "heat"], "label": ["A", "B"]}, "answerKey": "A"}
SHORT = {"id": "s", "question": "What is wet?", "choices": {"text": ["water", "ash"], "label": ["1", "2"]}}
CLEANING = {"decontamination": {"enabled": True, "benchmarks": ["arc_easy"]}}


def write_arc(root, rows=(SHORT | {"answerKey": "1"}, ARC)):
    path = root.benchmarks / "ai2_arc" / "ARC-Easy" / "test.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def planted(text: str = QUESTION) -> list[dict]:
    rows = [{"url": f"m/{i}", "text": prose(i, 80)} for i in range(20)]
    rows[7]["text"] += f"\nFrom an old test.\n{text.upper().replace(' ', '  ')}?\n" + prose(99)
    return rows


def plain(words: list[str]) -> set[str]:
    return {" ".join(words[i : i + 13]) for i in range(len(words) - 12)}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(1, 3), length=st.integers(0, 60))
def test_overlaps_of_any_text_are_those_of_sets_of_runs(seed: int, vocabulary: int, length: int) -> None:
    draw = random.Random(seed)
    words = ["a", "bb", "ccc"][:vocabulary]
    items = [" ".join(draw.choice(words) for _ in range(draw.randint(0, 30))) for _ in range(6)]
    text = " ".join(draw.choice(words) for _ in range(length))
    if draw.random() < 0.5:
        text += " " + draw.choice(items)
    found = Questions(("t", row, item) for row, item in enumerate(items, 1)).tasks_in(text)
    shared = {("t", row) for row, item in enumerate(items, 1) if plain(text.split()) & plain(item.split())}
    assert set(found) == shared
    for overlap in found.values():
        assert len(overlap.words.split()) == NGRAM_WORDS == 13
        assert f" {overlap.words} " in f" {text} "


def test_overlap_needs_thirteen_words_and_a_half_word_is_none() -> None:
    words = [f"w{i}" for i in range(30)]
    questions = Questions([("t", 1, " ".join(words))])
    assert questions.first_overlap("x " + " ".join(words[5:17]) + " y") is None
    found = questions.first_overlap("x " + " ".join(words[5:18]) + " y")
    assert found is not None
    assert (found.task, found.item, found.words) == ("t", 1, " ".join(words[5:18]))
    assert questions.first_overlap("x1" + " ".join(words[5:18]) + " y") is None
    assert questions.first_overlap(" ".join(words[:9] + words[10:22])) is None


@pytest.mark.parametrize("piece_chars", [1, 7, 40, 1000])
def test_overlap_across_the_pieces_of_a_long_text_is_found_once(monkeypatch, piece_chars: int) -> None:
    monkeypatch.setattr(decontamination, "_PIECE_CHARS", piece_chars)
    words = [f"w{i}" for i in range(30)]
    questions = Questions([("t", 1, " ".join(words[3:16])), ("t", 2, " ".join(words[8:25]))])
    text = "before, " + ",\n".join(words) + " after"
    found = questions.tasks_in(text)
    assert {item: overlap.words for (_, item), overlap in found.items()} == {
        1: " ".join(words[3:16]),
        2: " ".join(words[8:21]),
    }
    assert len(list(questions._overlaps(text))) == 1 + 5  # every shared run once, though pieces share words
    assert "".join(decontamination._pieces(text)) == text


def test_words_are_the_same_whatever_the_case_spaces_and_punctuation() -> None:
    words = ["the", "naïve", "strasse", "x", "1", "日本", "3", "5"]
    assert words_of('The  naïve\n"Straße" (x_1) — 日本, 3.5!') == words
    assert words_of("ÉLAN") == words_of("élan")


def test_questions_count_those_that_are_too_short_to_be_found() -> None:
    questions = Questions([("t", 1, "short one"), ("t", 2, " ".join("abcdefghijklm")), ("u", 1, "")])
    assert dict(questions.items) == {"t": 2, "u": 1}
    assert dict(questions.too_short) == {"t": 1, "u": 1}
    assert Questions([]).first_overlap(QUESTION) is None


def test_planted_question_is_found_and_named(one_source, root) -> None:
    config, lock = one_source("openwebmath", planted(), [{"text": prose(500 + i, 80)} for i in range(5)])
    write_arc(root)
    run_stage("raw", root, config, lock, [("openwebmath", key) for key in ("00000", "00001")])
    outcomes = run_stage("filtered", root, config, lock, [("openwebmath", key) for key in ("00000", "00001")])
    assert [outcome.error for outcome in outcomes] == [None, None]
    for workers in (1, 2):
        found = scan_corpus(root, lock, ["openwebmath"], ["arc_easy"], workers)
        assert found["tasks"] == {"arc_easy": {"questions": 2, "too_short": 1, "questions_found": 1, "documents": 1}}
        assert (found["documents"], found["documents_read"]) == (1, 25)
        (named,) = found["offending"]
        row, file = next(
            (row, file.key)
            for file in lock.files("openwebmath")
            for row, text in enumerate(texts(root, file.key))
            if "old test" in text
        )
        assert (named["source"], named["file"], named["row"], named["url"]) == ("openwebmath", file, row, "m/7")
        assert (named["task"], named["item"]) == ("arc_easy", 2)
        assert named["words"] == " ".join(QUESTION.lower().split()[:13])


def end_itself(piece: tuple[str, str]) -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_worker_that_is_killed_is_an_error_in_words() -> None:
    with pytest.raises(CorpusError, match=r"a worker .* was killed .* Run again, with fewer workers"):
        decontamination._scan_files(end_itself, [("openwebmath", "00000"), ("openwebmath", "00001")], 2)


def texts(root, key: str) -> list[str]:
    return pq.read_table(root.filtered("openwebmath", key))["text"].to_pylist()


def test_scan_reads_a_file_again_only_when_it_or_a_benchmark_changed(one_source, root, monkeypatch) -> None:
    config, lock = one_source("openwebmath", planted())
    write_arc(root)
    fetch_file(root, lock, "openwebmath", "00000")
    filter_file(root, config, lock, "openwebmath", "00000")
    first = scan_corpus(root, lock, ["openwebmath"], ["arc_easy"])
    opened: list[object] = []
    real = decontamination.pq.ParquetFile
    monkeypatch.setattr(decontamination.pq, "ParquetFile", lambda path: opened.append(path) or real(path))
    assert scan_corpus(root, lock, ["openwebmath"], ["arc_easy"]) == first
    assert not opened
    write_arc(root, [ARC | {"question": "Something else " * 8}])
    assert scan_corpus(root, lock, ["openwebmath"], ["arc_easy"])["documents"] == 0
    assert len(opened) == 1


def test_planted_question_is_removed_with_its_reason_where_that_is_switched_on(one_source, root) -> None:
    config, lock = one_source("openwebmath", planted(), **CLEANING)
    write_arc(root)
    fetch_file(root, lock, "openwebmath", "00000")
    report = filter_file(root, config, lock, "openwebmath", "00000")
    assert report["funnel"] == {"kept": 19, "contaminated": 1}
    assert not any("old test" in text for text in texts(root, "00000"))
    assert scan_corpus(root, lock, ["openwebmath"], ["arc_easy"])["documents"] == 0
    (shown,) = documents_dropped(root, config, lock, "openwebmath", "contaminated", 5)
    assert shown.document.row == 7
    assert pending("filtered", root, config, lock, "openwebmath") == []
    write_arc(root, [ARC | {"question": "Something else " * 8}])
    assert pending("filtered", root, config, lock, "openwebmath") == ["00000"]  # the questions are an input
    assert filter_file(root, config, lock, "openwebmath", "00000")["funnel"] == {"kept": 20}


def test_benchmark_that_is_not_at_hand_is_an_error_and_no_clean_bill(one_source, root) -> None:
    config, lock = one_source("openwebmath", planted(), **CLEANING)
    fetch_file(root, lock, "openwebmath", "00000")
    with pytest.raises(CorpusError, match=r"no rows of arc_easy \(1 of 1 missing\).*--prefetch"):
        filter_file(root, config, lock, "openwebmath", "00000")
    write_arc(root)
    with pytest.raises(CorpusError, match="57 of 58 missing"):
        scan_corpus(root, lock, ["openwebmath"], ["arc_easy", "mmlu"])


def test_settings_change_with_the_switch_alone() -> None:
    off = corpus_config(run_config())
    told = corpus_config(run_config(decontamination={"enabled": False, "benchmarks": ["arc_easy"]}))
    on = corpus_config(run_config(**CLEANING))
    for source in off.sources:
        assert off.settings_for("filtered", source) == told.settings_for("filtered", source)
        assert on.settings_for("filtered", source) != off.settings_for("filtered", source)
        assert "decontamination" not in off.settings_for("filtered", source)
    for stage in ("digests", "tokens", "manifest", "tokenizer"):
        assert on.settings_for(stage) == off.settings_for(stage)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"benchmarks": ["arc"]}, "'arc' is no benchmark"),
        ({"benchmarks": []}, "is empty"),
        ({"on": True}, "no key 'on'"),
    ],
)
def test_unusable_table_is_refused_by_its_key(table: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        corpus_config(run_config(decontamination=table))


def test_corpus_is_built_without_the_question_and_its_manifest_counts_it(root, folder, tmp_path, training) -> None:
    write_arc(root, [ARC | {"question": prose(3)}])  # a document of fineweb_edu, word for word
    assert BENCHMARKS["arc_easy"].folder in str(next(root.benchmarks.rglob("*.jsonl")))
    report = build_corpus(root, corpus_config(run_config(**CLEANING)), training, folder)
    assert report
    manifest = json.loads(root.manifest.read_text())
    assert manifest["sources"]["fineweb_edu"]["funnel"]["contaminated"] >= 1
    lost = manifest["sources"]["textbooks"]["funnel"]
    assert "contaminated" not in lost


def test_check_counts_by_task_names_the_documents_and_never_passes_unasked(one_source, root, monkeypatch) -> None:
    from rqwen3_pipeline.assets import contamination

    config, lock = one_source("openwebmath", planted())
    fetch_file(root, lock, "openwebmath", "00000")
    filter_file(root, config, lock, "openwebmath", "00000")
    run = run_config()

    def check(*benchmarks: str):
        run.sections["evaluation"] = {"benchmarks": list(benchmarks)}
        here = SimpleNamespace(root=root, corpus=config, lock=lock, run=run, settings=SimpleNamespace(workers=1))
        monkeypatch.setattr(contamination, "pipeline", lambda: here)
        return contamination.free_of_benchmarks()

    assert check().passed
    unasked = check("arc_easy")
    assert not unasked.passed
    assert unasked.description.startswith("Not checked: ")
    write_arc(root)
    found = check("arc_easy")
    assert not found.passed
    assert found.metadata["documents"].value == 1
    assert found.metadata["tasks"].value["arc_easy"]["documents"] == 1
    assert [entry["url"] for entry in found.metadata["offending"].value] == ["m/7"]
    write_arc(root, [ARC | {"question": "Something else " * 8}])
    assert check("arc_easy").passed
