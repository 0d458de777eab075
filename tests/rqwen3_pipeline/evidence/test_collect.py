import json
import math
import statistics

import pyarrow.parquet as pq
import pytest

from model.files import append_jsonl, read_json, sha256_file, write_json
from rqwen3_pipeline.evidence.collect import collect

# The planted rows of the fixture's sources (tests/rqwen3_pipeline/conftest.py).
ROWS = {"fineweb_edu": 170 + 7 + 6, "wikipedia": 24 + 5 + 4, "pes2o": 12}
DROPPED = {"fineweb_edu": 7, "wikipedia": 5, "pes2o": 0}
DUPLICATES = {"fineweb_edu": 6, "wikipedia": 4, "pes2o": 0}


@pytest.fixture(scope="module")
def evidence(finished_to_read):
    return collect(finished_to_read.root, finished_to_read.run)


def by_source(evidence):
    return {row["source"]: row for row in evidence["corpus"]["sources"]}


def holding(evidence):
    return {check["key"]: check["holds"] for check in evidence["checks"]}


def test_collect_of_a_finished_to_read_holds_every_check_and_misses_nothing(evidence):
    assert [check for check in evidence["checks"] if check["holds"] is not True] == []
    assert evidence["verdict"] == f"All {len(evidence['checks'])} checks hold."
    assert evidence["missing"] == []
    assert evidence["problems"] == []
    assert evidence["headline"].startswith("small is a language model of 14,")
    json.dumps(evidence, allow_nan=False)


def test_collect_states_the_tokenizers_ids_and_the_embeddings_rows_both(finished_to_read, evidence):
    manifest = read_json(finished_to_read.root.manifest)
    assert evidence["corpus"]["tokenizer_ids"]["value"] == manifest["tokenizer"]["vocab_size"]
    assert evidence["training"]["embedding_rows"]["value"] == finished_to_read.run.model.vocab_size == 320


def test_collect_twice_gives_the_same_and_names_no_absolute_path(finished_to_read, evidence):
    again = collect(finished_to_read.root, finished_to_read.run)
    first, second = (json.dumps(made, sort_keys=True) for made in (evidence, again))
    assert first == second
    assert str(finished_to_read.root.path) not in first


def test_collect_funnel_equals_the_planted_rows(evidence):
    rows = by_source(evidence)
    assert {name: row["rows"] for name, row in rows.items()} == ROWS
    assert {name: sum(row["dropped"].values()) for name, row in rows.items()} == DROPPED
    assert {name: row["duplicates"] for name, row in rows.items()} == DUPLICATES
    for name, row in rows.items():
        documents = ROWS[name] - DROPPED[name] - DUPLICATES[name]
        assert row["documents"] + row["heldout_documents"] == documents


def test_collect_used_documents_equal_a_count_of_document_ends(finished_to_read, evidence):
    root = finished_to_read.root
    rows = by_source(evidence)
    assert rows["fineweb_edu"]["tokens_used"] < rows["fineweb_edu"]["tokens"]
    for name, row in rows.items():
        inside, ends_on_border = 0, False
        for shard in read_json(root.manifest)["shards"]:
            if shard["source"] == name:
                ends = pq.read_table((root.path / shard["path"]).with_suffix(".docs.parquet"))["end"].to_pylist()
                inside += sum(end <= shard["tokens_used"] for end in ends)
                ends_on_border = ends_on_border or shard["tokens_used"] in ends
        assert (row["documents_used"], row["document_cut"]) == (inside, not ends_on_border)


def test_collect_shares_are_those_wanted_and_those_of_the_tokens_used(evidence):
    rows = by_source(evidence)
    assert {name: row["share_wanted"] for name, row in rows.items()} == {
        "fineweb_edu": 0.5,
        "wikipedia": 0.3,
        "pes2o": 0.2,
    }
    used = {name: row["tokens_used"] for name, row in rows.items()}
    assert rows["pes2o"]["share_realised"] == pytest.approx(used["pes2o"] / sum(used.values()))


def test_collect_windows_equal_a_simulation_of_the_reading(evidence):
    windows = 0
    for row in evidence["corpus"]["sources"]:
        start = 0
        while start + 33 <= row["tokens_used"]:
            windows, start = windows + 1, start + 32
    read = [i % windows for i in range(200 * 4)]
    whole = evidence["windows"]["whole_run"]
    assert evidence["windows"]["windows"] == windows
    assert (whole["reads"], whole["different"]) == (800, len(set(read)))
    assert whole["repeated_reads"] == len(read) - len(set(read)) > 0
    assert whole["unread"] == windows - len(set(read))
    assert any("reads are repeats" in note for note in evidence["notes"])


def test_collect_training_figures_equal_the_logs(finished_to_read, evidence):
    training = evidence["training"]
    value = {key: figure["value"] for key, figure in training.items() if isinstance(figure, dict) and "value" in figure}
    last = [finished_to_read.loss(step, 3) for step in range(181, 201)]
    assert value["uniform_loss"] == pytest.approx(math.log(320))
    assert value["start_loss"] == pytest.approx(math.log(320) + 0.02)
    assert value["start_gap"] == pytest.approx(0.02)
    assert value["end_loss"] == pytest.approx(last[-1])
    assert value["end_loss_mean"] == pytest.approx(statistics.fmean(last))
    assert value["perplexity"] == pytest.approx(math.exp(last[-1]))
    assert value["tokens_per_s"] == pytest.approx(statistics.median(range(1001, 1201)))
    assert value["tokens_per_s_overall"] == pytest.approx((80 + 53 + 80) * 128 / (140 + 193 + 260))
    assert value["tokens_kept"] == 200 * 128
    assert (value["submissions"], value["attempts"], value["lost_steps"]) == (3, 3, 13)
    assert value["mfu"] is None
    assert "CPU" in training["mfu"]["how"]
    assert training["curve"]["superseded"] == [[121, 133]]
    assert all(training[key]["from"] for key in value)


def test_collect_heldout_of_the_last_evaluation_is_that_of_the_last_submission(finished_to_read, evidence):
    rows = evidence["training"]["heldout"]
    assert [row["source"] for row in rows] == ["all", "fineweb_edu", "wikipedia", "pes2o"]
    assert rows[0]["step"] == 200
    assert rows[0]["loss"] == pytest.approx(finished_to_read.loss(200, 3) + 0.4)
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["loss"] * 403 / (1521 * math.log(2)))


def test_collect_receipts_equal_the_bytes_and_the_manifest(finished_to_read, evidence):
    root = finished_to_read.root
    receipts = evidence["receipts"]
    assert {receipt["what"] for receipt in receipts["files"]} >= {
        *("lock of the sources", "tokenizer", "manifest", "config of the run", "final checkpoint", "its sidecar"),
        *("export", "scores", "metrics", "ledger"),
    }
    for receipt in receipts["files"]:
        path = root.path / receipt["file"]
        assert (receipt["bytes"], receipt["sha256"]) == (path.stat().st_size, sha256_file(path))
    for shard in receipts["shards"]:
        assert shard["sha256"] == sha256_file(root.path / shard["file"])
        assert shard["size_agrees"]
    assert receipts["packages"]["numpy"]


def test_collect_scores_are_judged(evidence):
    rows = evidence["evaluation"]["scores"]
    assert [(row["metric"], row["verdict"]) for row in rows] == [
        ("acc", "above chance"),
        ("acc_norm", "not told apart from chance"),
    ]
    assert rows[0]["sigmas"] == pytest.approx((0.40 - 0.25) / 0.04)


def test_collect_of_an_empty_root_makes_up_nothing(empty_run):
    evidence = collect(empty_run.root, empty_run.run)
    holds = holding(evidence)
    assert {key for key, state in holds.items() if state is not None} == {"readable"}
    assert evidence["training"]["start_loss"]["value"] is None
    assert evidence["training"]["tokens_kept"]["value"] == 0
    assert evidence["windows"] is None
    assert evidence["evaluation"] is None
    missing = {item["what"]: item["command"] for item in evidence["missing"]}
    assert missing["the corpus and its manifest"] == "rqwen3 --profile FILE.toml corpus build"
    assert missing["the evaluation's scores"] == "rqwen3 --profile FILE.toml run"
    assert "No step" in evidence["headline"]


def test_collect_of_a_half_finished_run_is_pending_not_passed(corpus_run):
    corpus_run.begin()
    corpus_run.log_steps(1, 1, 90)
    corpus_run.end(1, 0, 90, 80, "killed", 137)
    corpus_run.save(80)
    evidence = collect(corpus_run.root, corpus_run.run)
    holds = holding(evidence)
    assert holds["finished"] is None
    assert holds["scored"] is None
    assert holds["start"] is True
    assert evidence["windows"]["so_far"]["reads"] == 80 * 4
    assert "in the making: 80 of 200 steps" in evidence["headline"]
    assert {"the final checkpoint", "the export for Hugging Face"} <= {item["what"] for item in evidence["missing"]}


def break_shard(sample):
    path = sample.root.path / read_json(sample.root.manifest)["shards"][0]["path"]
    path.write_bytes(path.read_bytes()[:-1])


def break_final(sample):
    (sample.folder / "checkpoints" / "final.pt").write_bytes(b"checkpoint of step 20!")


def break_config(sample):
    path = sample.folder / "config.toml"
    path.write_text(path.read_text().replace("warmup_steps = 20", "warmup_steps = 21"), encoding="utf-8")


def break_survivors(sample):
    (sample.root.path / "survivors" / "pes2o" / "00000.npy").write_bytes(
        (sample.root.path / "survivors" / "wikipedia" / "00000.npy").read_bytes()
    )


def break_lock(sample):
    sample.root.lock.write_text(sample.root.lock.read_text() + "\n", encoding="utf-8")


def break_manifest(sample):
    data = read_json(sample.root.manifest)
    write_json(sample.root.manifest, {**data, "added": True})


def break_chain(sample):
    sample.end(4, 150, 200, 200, "finished", 0)


def break_heldout(sample):
    entry = {"submission": 3, "attempt": 1, "kind": "heldout", "step": 200, "source": "all", "loss": 3.0}
    append_jsonl(sample.folder / "metrics.jsonl", {**entry, "bits_per_byte": 3.0, "tokens": 100, "text_bytes": 400})


def break_losses(sample):
    sample.log_steps(3, 200, 200, loss=None)


def break_update(sample):
    sample.log_steps(3, 200, 200, grad_norm=None, skipped=True)


def break_tokens(sample):
    sample.log_steps(3, 200, 200, tokens=199 * 128)


def break_start(sample):
    text = (sample.folder / "metrics.jsonl").read_text()
    first = json.loads(text.splitlines()[0])
    lines = [json.dumps({**first, "loss": 11.9}), *text.splitlines()[1:]]
    (sample.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def break_filter_stamp(sample):
    path = sample.root.filtered("pes2o", "00000").with_suffix(".stamp.json")
    stamp = read_json(path)
    write_json(path, {**stamp, "report": {**stamp["report"], "rows": stamp["report"]["rows"] + 1}})


def break_scores(sample):
    path = sample.root.evaluation("small") / "scores.json"
    write_json(path, {**read_json(path), "checkpoint": {"sha256": "0" * 64}})


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        (break_shard, {"shards"}),
        (break_final, {"final", "scored"}),
        (break_config, {"config"}),
        (break_survivors, {"documents"}),
        (break_lock, {"lock"}),
        (break_manifest, {"trained_on"}),
        (break_chain, {"chain"}),
        (break_heldout, {"bits_per_byte"}),
        (break_losses, {"finite"}),
        (break_update, {"finite"}),
        (break_tokens, {"tokens"}),
        (break_start, {"start"}),
        (break_filter_stamp, {"funnel"}),
        (break_scores, {"scored"}),
    ],
)
def test_collect_after_one_fault_fails_just_its_check(finished_run, fault, failing):
    fault(finished_run)
    evidence = collect(finished_run.root, finished_run.run)
    assert {key for key, state in holding(evidence).items() if state is False} == failing
    assert "not" in evidence["verdict"]


def seen_of(evidence, key):
    return next(check["seen"] for check in evidence["checks"] if check["key"] == key)


def test_collect_counts_a_skipped_update_and_says_how_many_steps_were_logged(corpus_run):
    corpus_run.begin()
    corpus_run.log_steps(1, 1, 1)
    corpus_run.log_steps(1, 7, 7, grad_norm=None, skipped=True)
    corpus_run.log_steps(1, 10, 10)
    evidence = collect(corpus_run.root, corpus_run.run)
    assert holding(evidence)["finite"] is False
    assert seen_of(evidence, "finite").startswith("1 of 3 logged lines, of 10 steps;")
    assert evidence["training"]["skipped_steps"]["value"] == 1


def test_collect_of_attempts_that_ended_before_they_had_loaded_anything_breaks_no_chain(corpus_run):
    corpus_run.begin()
    corpus_run.end(1, 0, 80, 80, "deadline", 75)
    unloaded = {"from_step": None, "to_step": None, "tokens": 0, "lost_steps": 0, "lost_steps_at_most": 0}
    corpus_run.end(2, 0, 0, 80, "killed", None, **unloaded, ended=None)
    corpus_run.end(2, 0, 0, 60, "error", 1, **unloaded, attempt=2)
    corpus_run.end(2, 80, 200, 200, "finished", 0, attempt=3)
    evidence = collect(corpus_run.root, corpus_run.run)
    assert holding(evidence)["chain"] is True
    assert evidence["training"]["lost_steps_at_most"]["value"] == 0


@pytest.mark.parametrize(
    ("most", "value", "note"),
    [
        ({"lost_steps_at_most": 9}, 9, "3 to 9 steps were lost"),
        ({"lost_steps_at_most": 3}, 3, "3 steps were lost"),
        ({"lost_steps_at_most": None}, None, "At least 3 steps were lost"),
        ({}, None, "At least 3 steps were lost"),
        ({"ended": "2026-07-01T00:02:00+00:00"}, 3, "3 steps were lost"),
    ],
)
def test_collect_says_no_more_of_the_lost_steps_than_the_ledger_knows(corpus_run, most, value, note):
    corpus_run.begin()
    corpus_run.end(1, 0, 83, 80, "killed", None, **{"ended": None, **most})
    evidence = collect(corpus_run.root, corpus_run.run)
    assert evidence["training"]["lost_steps_at_most"]["value"] == value
    assert evidence["training"]["ledger"][0]["lost_steps_at_most"] == value
    assert any(said.startswith(note) for said in evidence["notes"])


@pytest.mark.parametrize("ended", [True, False])
def test_collect_drops_the_lost_branch_though_the_next_submission_logs_more_seldom(corpus_run, ended):
    corpus_run.begin()
    corpus_run.log_steps(1, 1, 17)
    corpus_run.end(1, 0, 17, 12, "killed", None)
    corpus_run.log_steps(2, 20, 20)
    if ended:
        corpus_run.end(2, 12, 20, 20, "deadline", 75)
    else:
        write_json(corpus_run.folder / "LOCK", {"submission": 2, "attempt": 1, "from_step": 12})
    curve = collect(corpus_run.root, corpus_run.run)["training"]["curve"]
    assert (curve["lines"], curve["abandoned"]) == (13, [[13, 17]])


def test_collect_with_a_torn_manifest_says_which_file_and_goes_on(finished_run):
    finished_run.root.manifest.write_text('{"format_version": 1,', encoding="utf-8")
    evidence = collect(finished_run.root, finished_run.run)
    assert [problem["file"] for problem in evidence["problems"]] == ["manifest.json"]
    assert holding(evidence)["readable"] is False
    assert evidence["training"]["end_loss"]["value"] is not None


def test_collect_with_a_recorded_deviation_holds_the_start_loss_to_it(corpus_run):
    corpus_run.begin()
    corpus_run.log_steps(1, 1, 3, logit_std=0.2)
    assert holding(collect(corpus_run.root, corpus_run.run))["start"] is True
    (corpus_run.folder / "metrics.jsonl").unlink()
    corpus_run.log_steps(1, 1, 3, logit_std=0.6)
    assert holding(collect(corpus_run.root, corpus_run.run))["start"] is False
