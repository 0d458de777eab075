import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import load_run_config
from model.errors import CheckpointError, ConfigError
from model.files import append_jsonl, write_json
from rqwen3_pipeline import training
from rqwen3_pipeline.settings import RunRoot
from tests.rqwen3_pipeline.site import PROFILE


def record(submission, from_step, saved_step, *, code=75, lost=0, attempt=1):
    return {
        "submission": submission,
        "attempt": attempt,
        "from_step": from_step,
        "saved_step": saved_step,
        "lost_steps": lost,
        "exit_code": code,
    }


def test_submission_key_and_its_parser_agree():
    assert training.submission_key("demo", 7) == "demo.07"
    assert training.parse_submission("demo.07", "demo") == 7
    assert training.parse_submission("demo.123", "demo") == 123


@pytest.mark.parametrize("key", ["other.01", "demo.00", "demo.x", "demo", "demo.-1", ".01"])
def test_submission_key_of_another_experiment_or_no_number_is_refused(key):
    with pytest.raises(ConfigError, match=r"demo\.01"):
        training.parse_submission(key, "demo")


def test_next_submission_after_a_failed_attempt_is_the_same_one(tmp_path):
    root = RunRoot(tmp_path)
    ledger = root.experiment("demo") / "ledger.jsonl"
    assert training.next_submission(root, "demo") == 1
    append_jsonl(ledger, record(1, 0, 5))
    append_jsonl(ledger, record(2, 5, 5, code=1))
    assert training.next_submission(root, "demo") == 2
    append_jsonl(ledger, record(2, 5, 9, attempt=2))
    assert training.next_submission(root, "demo") == 3


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_steps_by_submission_of_an_unbroken_chain_finds_no_problem(lengths):
    records, position = [], 0
    for number, length in enumerate(lengths, start=1):
        records.append(record(number, position, position + length))
        position += length
    assert training.steps_by_submission(records, position)[1] == []
    assert training.steps_by_submission(records, position + 1)[1] == [
        f"the ledger ends at step {position} of {position + 1}"
    ]


def test_steps_by_submission_with_a_gap_or_a_repeat_names_the_submission():
    assert "submission 2 began at step 7" in training.steps_by_submission([record(1, 0, 5), record(2, 7, 9)], 9)[1][0]
    assert "submission 2 began at step 3" in training.steps_by_submission([record(1, 0, 5), record(2, 3, 9)], 9)[1][0]


def test_verify_final_with_one_byte_changed_is_refused(tmp_path):
    root = RunRoot(tmp_path)
    final = root.experiment("demo") / "checkpoints" / "final.pt"
    final.parent.mkdir(parents=True)
    final.write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="submission 01"):
        training.verify_final(root, "demo")
    from hashlib import sha256

    write_json(final.with_suffix(".json"), {"bytes": 7, "sha256": sha256(b"weights").hexdigest(), "step": 3})
    assert training.verify_final(root, "demo")["step"] == 3
    final.write_bytes(b"weighTs")
    with pytest.raises(CheckpointError, match="sidecar says"):
        training.verify_final(root, "demo")


def test_job_arguments_outside_a_job_change_nothing():
    assert training.job_arguments({}, 100.0) == ([], 100.0)


def test_job_arguments_in_a_job_hand_on_stop_file_lock_question_and_what_is_left():
    environment = {
        "SLURM_JOB_ID": "5",
        "RQWEN3_STOP_FILE": "/a b/stop",
        "RQWEN3_DEADLINE": f"{time.time() + 500:.0f}",
    }
    arguments, limit_s = training.job_arguments(environment, 0.0)
    assert arguments[:3] == ["--stop-file", "/a b/stop", "--job-alive-command"]
    assert arguments[3].endswith("-m rqwen3_pipeline.slurm.alive")
    assert 440 < limit_s <= 501
    assert training.job_arguments(environment, 60.0)[1] == 60.0
    assert 440 < training.job_arguments(environment, 9000.0)[1] <= 501


def test_job_arguments_after_the_jobs_end_leave_a_second():
    assert training.job_arguments({"RQWEN3_DEADLINE": "1000"}, 0.0)[1] == 1.0


@pytest.mark.parametrize(("content", "expected"), [("cancel", True), ("", False), (None, False)])
def test_cancelled_is_told_from_a_job_whose_time_is_up(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "stop").write_text(content)
    assert training.cancelled({"RQWEN3_STOP_FILE": str(tmp_path / "stop")}) is expected
    assert training.cancelled({}) is False


def test_bad_submissions_section_is_told_with_its_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(PROFILE + "[submissions]\nretries = -1\n")
    with pytest.raises(ConfigError, match=r"config\.toml: submissions\.retries = -1"):
        training.submissions_config(load_run_config(path))
