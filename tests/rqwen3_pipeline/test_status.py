import json
import os
import shutil
import socket

import pytest

from model.files import append_jsonl, read_json, sha256_file, write_json
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.evidence.report import write_report
from rqwen3_pipeline.experiment_files import went_on_from
from rqwen3_pipeline.status import render, status

SCREEN_COLUMNS, SCREEN_LINES = 100, 40


def look(sample):
    found = status(sample.root, sample.run, sample.config_path)
    json.dumps(found, allow_nan=False)
    for encoding in ("utf-8", "ascii"):
        text = render(found, encoding)
        text.encode(encoding)
        assert all(len(line) <= SCREEN_COLUMNS or str(sample.root.path) in line for line in text.splitlines())
        assert len(text.splitlines()) <= SCREEN_LINES
    return found, render(found, "utf-8")


def test_status_of_an_empty_root_names_the_first_command_and_makes_nothing(empty_run):
    found, text = look(empty_run)
    assert found["next"]["command"] == f"rqwen3 --home {empty_run.root.path} --profile {empty_run.config_path} run"
    assert found["stages"] == {}
    assert "not locked yet" in text
    assert "not begun" in text
    assert not empty_run.root.path.exists()


def test_status_after_the_lock_wants_every_piece(empty_run):
    lock_folder(empty_run.root, corpus_config(empty_run.run), empty_run.sources)
    found, text = look(empty_run)
    assert found["lock"] == {"present": True, "files": 3, "problem": None}
    assert found["stages"]["raw"]["pes2o"] == {"done": 0, "wanted": 1, "missing": ["00000"]}
    assert set(found["stages"]["survivors"]) == {"wikipedia_fineweb_edu", "pes2o"}
    assert found["next"]["why"].startswith("14 pieces")
    assert "0/1" in text


def test_status_of_a_built_corpus_counts_like_its_manifest(corpus_run):
    found, _ = look(corpus_run)
    assert all(row["missing"] == [] for rows in found["stages"].values() for row in rows.values())
    manifest = read_json(corpus_run.root.manifest)
    for source, counts in found["sources"].items():
        for name in ("documents", "tokens", "text_bytes", "heldout_documents", "heldout_tokens"):
            assert counts[name] == manifest["sources"][source][name]
    assert found["manifest"]["sha256"] == sha256_file(corpus_run.root.manifest)
    assert found["manifest"]["tokens_used"] == sum(shard["tokens_used"] for shard in manifest["shards"])
    assert found["next"] == {
        "command": f"rqwen3 --home {corpus_run.root.path} --profile {corpus_run.config_path} run",
        "why": "the training stands at step 0 of 200.",
    }


def test_status_after_a_piece_was_lost_names_it(corpus_run):
    corpus_run.root.filtered("pes2o", "00000").unlink()
    found, text = look(corpus_run)
    assert found["stages"]["filtered"]["pes2o"]["missing"] == ["00000"]
    assert "pieces of the corpus are not made yet" in found["next"]["why"]
    assert f"next: rqwen3 --home {corpus_run.root.path} --profile {corpus_run.config_path} run" in text


def test_status_without_a_manifest_says_so(corpus_run):
    corpus_run.root.manifest.unlink()
    found, text = look(corpus_run)
    assert found["next"]["why"] == "the corpus lacks its manifest"
    assert "manifest: not made yet" in text


def test_status_of_a_killed_training_shows_saved_and_logged_steps(corpus_run):
    corpus_run.begin()
    corpus_run.log_steps(1, 1, 90)
    corpus_run.end(1, 0, 90, 80, "killed", 137)
    corpus_run.save(80)
    (corpus_run.folder / "checkpoints" / "step_88.pt").write_bytes(b"torn")
    found, text = look(corpus_run)
    experiment = found["experiments"]["small"]
    assert (experiment["steps_saved"], experiment["steps_logged"], experiment["max_steps"]) == (80, 90, 200)
    assert experiment["loss"] == pytest.approx(corpus_run.loss(90, 1))
    assert experiment["submissions"][0]["stop_reason"] == "killed"
    assert experiment["finished"] is False
    assert "80 of 200 steps saved, 90 logged" in text
    assert "damaged or unfinished: step_88.pt" in text
    assert found["next"]["why"] == "the training stands at step 80 of 200."


def test_status_of_a_kill_between_two_logged_steps_tells_how_much_was_lost_at_most(corpus_run):
    corpus_run.begin()
    killed = {"submission": 1, "attempt": 1, "from_step": 0, "to_step": 80, "saved_step": 40, "stop_reason": "killed"}
    append_jsonl(corpus_run.folder / "ledger.jsonl", {**killed, "lost_steps": 40, "lost_steps_at_most": 49})
    assert "40 to 49" in look(corpus_run)[1]


def test_attempts_of_a_folder_went_on_from_where_ledger_and_lock_say(corpus_run):
    corpus_run.begin()
    ledger = [{"submission": 1, "attempt": 1, "from_step": 0}, {"submission": 1, "attempt": 2, "from_step": None}]
    before = {"submission": 1, "attempt": 3, "from_step": 20}
    write_json(corpus_run.folder / "LOCK", {"submission": 2, "attempt": 1, "from_step": 40, "predecessors": [before]})
    assert went_on_from(corpus_run.folder, ledger) == {(1, 1): 0, (1, 3): 20, (2, 1): 40}


@pytest.mark.parametrize(
    ("host", "command", "says"),
    [
        (socket.gethostname(), None, "submission 2 is training"),
        ("elsewhere", "rqwen3 --home {home} --profile {profile} run", "The lock names elsewhere"),
    ],
)
def test_status_with_the_lock_held_tells_whether_somebody_trains(corpus_run, host, command, says):
    corpus_run.begin()
    write_json(corpus_run.folder / "LOCK", {"host": host, "pid": os.getpid(), "submission": 2})
    found, text = look(corpus_run)
    assert found["next"]["command"] == (
        command and command.format(home=corpus_run.root.path, profile=corpus_run.config_path)
    )
    assert says in found["next"]["why"]
    assert ("alive" in text) == (command is None) or "can't be told" in text


def test_status_with_the_lock_of_a_dead_trainer_of_this_host_sends_nobody_to_look(corpus_run):
    corpus_run.begin()
    write_json(corpus_run.folder / "LOCK", {"host": socket.gethostname(), "pid": 2**22 + 1, "submission": 1})
    found, text = look(corpus_run)
    assert "dead; the next submission takes it over" in text
    assert found["next"]["why"] == "the training stands at step 0 of 200."


def test_status_goes_through_export_evaluation_and_report_to_the_end(finished_run):
    root, run = finished_run.root, finished_run.run
    shutil.rmtree(root.export("small"))
    assert look(finished_run)[0]["next"]["why"].startswith("the export")
    finished_run.export_and_score()
    (root.evaluation("small") / "scores.json").unlink()
    assert look(finished_run)[0]["next"]["why"].startswith("the evaluation")
    finished_run.export_and_score()
    assert look(finished_run)[0]["next"]["why"].startswith("the report")
    write_report(root, run)
    found, text = look(finished_run)
    assert found["next"]["command"] is None
    assert found["evidence"] == {"small": "evidence/small/index.html"}
    assert found["exports"] == {"small": "exports/small/config.json"}
    assert "200 of 200 steps saved" in text
    assert "80, 120, 160, 200, final" in text


def test_status_of_an_experiment_that_was_trained_on_another_manifest_is_never_all_is_done(finished_run):
    write_report(finished_run.root, finished_run.run)
    assert look(finished_run)[0]["next"]["why"].startswith("all is done")
    manifest = finished_run.root.manifest
    manifest.write_text(manifest.read_text(encoding="utf-8") + " ", encoding="utf-8")
    found, _ = look(finished_run)
    assert "was trained on the manifest" in found["next"]["why"]
    assert found["next"]["command"] is None


def test_status_with_damaged_files_comes_out(finished_run):
    finished_run.root.manifest.write_text("{", encoding="utf-8")
    finished_run.root.lock.write_text("{", encoding="utf-8")
    found, text = look(finished_run)
    assert "problem" in found["manifest"]
    assert "not valid JSON" in found["lock"]["problem"]
    assert "damaged" in text


def test_render_without_an_encoding_that_can_draw_falls_back_to_ascii(finished_run):
    found = status(finished_run.root, finished_run.run, finished_run.config_path)
    assert "█" in render(found, "utf-8")
    for encoding in ("ascii", "latin-1", "no-such-encoding"):
        text = render(found, encoding)
        assert "█" not in text
        assert "########" in text
        text.encode("ascii")


def test_render_aligns_its_tables(finished_run):
    lines = render(status(finished_run.root, finished_run.run, finished_run.config_path), "utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("source"))
    header, rule, *rows = lines[start : start + 5]
    assert {len(line) for line in (header, *rows)} == {len(rule)}
