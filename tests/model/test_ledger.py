"""The ledger's word for a failure, by the error itself and by what caused it."""

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from model.errors import CheckpointError, ConfigError, DiskSpaceError, LockHeldError, OutOfMemory, TrainingError
from model.files import append_jsonl, read_jsonl
from model.ledger import exit_code_of, failure_reason, settle
from model.metrics import Attempt, RunLog


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfMemory("in the dry step"), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (DiskSpaceError("2 GiB free"), "disk_full"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (caused(CheckpointError("could not be written"), OSError(errno.ENOSPC, "No space left")), "disk_full"),
        (CheckpointError("none of the 3 checkpoints is whole"), "error"),
        (TrainingError("loss nan"), "non_finite"),
        (OSError(errno.EACCES, "Permission denied"), "error"),
        (RuntimeError("shapes do not fit"), "error"),
        (ConfigError("no such key"), "error"),
    ],
)
def test_failure_reason_of_an_error_is_the_ledgers_word(error, reason):
    assert failure_reason(error) == reason


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfMemory("in the dry step"), 71),
        (caused(CheckpointError("could not be written"), OSError(errno.ENOSPC, "No space left")), 74),
        (OSError(errno.EFBIG, "File too large"), 74),
        (TrainingError("loss nan"), 65),
        (ConfigError("no such key"), 2),
        (LockHeldError("held"), 73),
        (OSError(errno.EACCES, "Permission denied"), 1),
        (RuntimeError("shapes do not fit"), 1),
    ],
)
def test_exit_code_of_an_error_says_what_the_ledger_would(error, code):
    assert exit_code_of(error) == code


def test_failure_reason_of_torchs_own_error_under_a_memory_limit_is_out_of_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 * 2**30, before[1]))
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**37)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert failure_reason(caught.value) == "out_of_memory"


def holder(**more: Any) -> dict[str, Any]:
    """A dead trainer's lock that began at step 4 and logs every 5 steps."""
    who = {"submission": 2, "attempt": 1, "pid": 7, "host": "node", "started": "2026-01-01T00:00:00.000+00:00"}
    return {**who, "token": "t", "from_step": 4, "log_every_steps": 5, **more}


def settled(run_dir: Path, tiny, *holders: dict[str, Any]) -> list[dict[str, Any]]:
    settle(run_dir, list(holders), tiny.config.training)
    return read_jsonl(run_dir / "ledger.jsonl")


def extent_of(record: dict[str, Any]) -> tuple[Any, ...]:
    names = ("from_step", "to_step", "saved_step", "tokens", "lost_steps", "lost_steps_at_most")
    return tuple(record[name] for name in names)


@pytest.mark.parametrize(
    ("lock", "logged", "extent", "told"),
    [
        ({"from_step": None}, 9, (None, None, 0, 0, 0, 0), "before it had loaded anything; nothing is lost"),
        ({"from_step": 0}, None, (0, 0, 0, 0, 0, 1), "0 to 1 steps after step 0"),
        ({}, None, (4, 4, 0, 0, 4, 5), "4 to 5 steps after step 0"),
        ({}, 5, (4, 5, 0, 256, 5, 10), "5 to 10 steps after step 0"),
        ({}, 7, (4, 7, 0, 768, 7, 10), "7 to 10 steps"),  # a skipped step, which is logged too
        ({}, 10, (4, 10, 0, 1536, 10, 12), "10 to 12 steps"),  # the run has 12
        ({}, 12, (4, 12, 0, 2048, 12, 12), "12 steps after step 0"),
        ({"log_every_steps": None}, 5, (4, 5, 0, 256, 5, None), "at least 5 steps after step 0"),
    ],
)
def test_record_of_a_killed_trainer_gives_the_least_and_the_most_that_is_lost(
    tmp_path, tiny, capsys, lock, logged, extent, told
):
    if logged is not None:
        RunLog(tmp_path, Attempt(submission=2, attempt=1)).train({"step": logged})
    (record,) = settled(tmp_path, tiny, holder(**lock))
    assert extent_of(record) == extent
    assert (record["stop_reason"], record["exit_code"], record["token"]) == ("killed", None, "t")
    assert told in capsys.readouterr().err


def test_settle_passes_over_the_steps_that_an_earlier_process_of_the_same_numbers_logged(tmp_path, tiny):
    RunLog(tmp_path, Attempt(submission=2, attempt=1)).train({"step": 9})
    (record,) = settled(tmp_path, tiny, holder(started="9999-01-01T00:00:00.000+00:00"))
    assert record["to_step"] == 4


def test_settle_writes_each_record_once_and_none_for_a_process_that_wrote_its_own(tmp_path, tiny):
    append_jsonl(tmp_path / "ledger.jsonl", {"submission": 1, "attempt": 1, "token": "own", "exit_code": 75})
    append_jsonl(tmp_path / "ledger.jsonl", {"submission": 1, "attempt": 1, "exit_code": 75})  # an older trainer's
    killed = holder(submission=1, token="killed")
    for _ in range(2):
        records = settled(tmp_path, tiny, holder(submission=1, token="own"), killed)
    assert [record.get("token") for record in records] == ["own", None, "killed"]
