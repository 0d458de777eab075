"""The ledger's word for a failure, by the error itself and by what caused it."""

import errno
import resource

import pytest
import torch

from model.errors import CheckpointError, ConfigError, DiskSpaceError, LockHeldError, OutOfMemory, TrainingError
from model.ledger import exit_code_of, failure_reason


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
