"""What a submission tells the UI: numbers that plot, nothing that breaks a page, and an alert where a loss is none."""

import math
import sys
import threading
import time
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterRunStatus

import rqwen3_pipeline.assets.submissions as submissions_module
from rqwen3_pipeline.assets import common
from rqwen3_pipeline.assets.common import LONGEST_CHARACTERS, metadata
from rqwen3_pipeline.assets.submissions import ATTEMPT_TAG, EXIT_CODE_TAG, submissions
from rqwen3_pipeline.definitions import defs
from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.experiments.observed import facts_now
from rqwen3_pipeline.experiments.policy import Action, Policy, decide
from rqwen3_pipeline.programs import ProgramFailedError

KEY = "small.01"
HANGS_S = 30.0


@pytest.fixture
def here(corpus_run, monkeypatch):
    monkeypatch.setenv("RQWEN3_PROFILE", str(corpus_run.config_path))
    monkeypatch.setenv("RQWEN3_HOME", str(corpus_run.root.path))
    corpus_run.begin()
    corpus_run.log_steps(1, 1, 80)
    corpus_run.end(1, 0, 80, 80, "deadline", 75)
    corpus_run.save(80)
    return corpus_run


def told() -> tuple[dict, dg.AssetCheckEvaluation]:
    """Metadata and check of the submission, which the ledger says is done."""
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("submissions", [KEY])
        result = dg.materialize([submissions], instance=instance, partition_key=KEY)
        (event,) = result.asset_materializations_for_node("submissions")
        (check,) = result.get_asset_check_evaluations()
        return dict(event.metadata), check


def test_submission_that_was_cut_and_saved_is_materialized_with_its_figures(here):
    figures, check = told()
    assert figures["saved_step"].value == 80
    assert figures["stop_reason"].value == "deadline"
    assert figures["loss"].value == pytest.approx(here.loss(80, 1))
    assert "svg" in figures["loss_plot"].value or "!" in figures["loss_plot"].value
    assert check.passed


def test_submission_with_a_loss_that_is_no_number_raises_an_alert_that_names_the_step(here):
    here.log_steps(1, 81, 81, loss=None)
    _, check = told()
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN)
    said = str(check.description)
    assert said.startswith("no finite loss at 1 steps, the first is 81: rqwen3 --profile ")
    assert said.endswith("config.toml trace --step 81 --loss")


def test_metadata_of_numbers_that_are_none_is_text_and_of_long_text_a_file(here):
    long = "x" * 20_000_000
    shown = metadata({"loss": math.nan, "perplexity": math.inf, "deep": {"norm": [-math.inf]}, "error": long})
    assert (shown["loss"].value, shown["perplexity"].value) == ("nan", "inf")
    assert shown["deep"].value == {"norm": ["-inf"]}
    path = Path(shown["error"].value)
    assert here.root.path in path.parents
    assert path.read_text() == long
    assert metadata({"error": "x" * LONGEST_CHARACTERS})["error"] == "x" * LONGEST_CHARACTERS


@pytest.mark.parametrize(
    ("tag", "others", "attempt"), [(None, [], 1), ("4", ["3"], 4), ("1", ["1", "2"], 3), (None, [None], 2)]
)
def test_attempt_is_later_than_all_that_left_a_trace_and_none_before_what_the_run_was_told(
    corpus_run, monkeypatch, tag, others, attempt
):
    """Runs whose trainer never began leave none in the files; a run copied by hand brings its model's number."""
    monkeypatch.setenv("RQWEN3_PROFILE", str(corpus_run.config_path))
    monkeypatch.setenv("RQWEN3_HOME", str(corpus_run.root.path))
    asked = []

    def fail(*_, **told):
        asked.append(told["attempt"])
        raise ProgramFailedError("killed", -9)

    monkeypatch.setattr("rqwen3_pipeline.training.run_submission", fail)
    job = defs.resolve_job_def("train_submission")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("submissions", [KEY])
        for other in others:
            tags = {"dagster/partition": KEY, **({ATTEMPT_TAG: other} if other else {})}
            instance.create_run_for_job(job, tags=tags, status=DagsterRunStatus.FAILURE)
        tags = {ATTEMPT_TAG: tag} if tag else {}
        done = job.execute_in_process(instance=instance, partition_key=KEY, tags=tags, raise_on_error=False)
        run = instance.get_run_by_id(done.run_id)
    assert asked == [attempt]
    assert (run.tags[ATTEMPT_TAG], run.tags[EXIT_CODE_TAG]) == (str(attempt), "-9")


@pytest.mark.parametrize("method", ["get_runs", "add_run_tags", "get_run_record_by_id"])
def test_event_store_that_never_answers_neither_holds_up_nor_ends_a_submission(here, monkeypatch, method):
    """A database whose packets are dropped is silent until TCP gives up, minutes later."""
    of_dagster, asked, over = getattr(dg.DagsterInstance, method), [], threading.Event()

    def silent(*given, **named):
        if sys._getframe(1).f_globals["__name__"] == submissions_module.__name__:
            asked.append(method)
            over.wait(HANGS_S)
        return of_dagster(*given, **named)

    monkeypatch.setattr(common, "STORE_LIMIT_S", 0.2, raising=False)
    monkeypatch.setattr(dg.DagsterInstance, method, silent)
    began = time.monotonic()
    figures, _ = told()
    assert time.monotonic() - began < HANGS_S
    over.set()
    assert asked
    assert figures["saved_step"].value == 80


def test_submission_that_was_in_the_queue_when_a_hand_stopped_the_experiment_does_not_train(here):
    control.stop(here.root, "small", "wrong corpus")
    told()  # the first one is done, and only told
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("submissions", ["small.02"])
        with pytest.raises(control.StoppedByHandError, match=r"wrong corpus.*rqwen3 experiment resume small"):
            dg.materialize([submissions], instance=instance, partition_key="small.02")
        facts = facts_now(here.root, here.run, instance, None, needs_preflight=True)
        assert decide(facts, Policy()).reason.startswith("stopped by hand")
        control.resume(here.root, "small", facts.attempts[-1].place)
        again = decide(facts_now(here.root, here.run, instance, None, needs_preflight=True), Policy())
    assert (again.action, again.submission, again.attempt) == (Action.SUBMIT, 2, 2)
