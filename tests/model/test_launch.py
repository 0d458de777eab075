import os
import signal
from collections.abc import Sequence

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from model import launch
from model.preemption import SIGNALS


def launched(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], *, failed: bool, signals: Sequence[signal.Signals] = ()
) -> int:
    """The launcher's exit code after trainers that end so, in that order; `failed` is torchrun's view."""

    def torchrun(arguments: list[str]) -> None:
        for code in codes:
            launch.report(code)
        if failed:
            raise ChildFailedError("model.pretrain", {0: ProcessFailure(0, 4711, 1, "")})

    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    monkeypatch.setattr(launch, "SIGNALS", signals)
    monkeypatch.setenv(launch.EXIT_CODE_FILE, "")  # so that it is taken away again
    return launch.main([])


@pytest.mark.parametrize(
    ("codes", "failed", "expected"),
    [
        ([0, 0], False, 0),
        ([75, 75], False, 75),
        ([71, 1], True, 71),  # the second follows from the first
        ([0, 71], True, 71),
        ([75], True, 1),  # another one crashed without a word
        ([], True, 1),
        ([], False, 1),
        ([1, 0, 0], False, 0),  # torchrun started them anew
    ],
)
def test_launcher_ends_with_the_code_of_the_first_failure(monkeypatch, codes, failed, expected) -> None:
    assert launched(monkeypatch, codes, failed=failed) == expected


@pytest.mark.parametrize(("code", "failed"), [(0, False), (75, False), (71, True)])
def test_signal_after_the_trainers_have_ended_changes_no_exit_code(monkeypatch, code: int, failed: bool) -> None:
    report = launch.report
    monkeypatch.setattr(launch, "report", lambda code: (report(code), os.kill(os.getpid(), signal.SIGTERM)))
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        with pytest.raises(SystemExit) as ended:
            launched(monkeypatch, [code], failed=failed, signals=SIGNALS)
        assert ended.value.code == code
        os.kill(os.getpid(), signal.SIGUSR1)  # to the very end
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (75, 0), (71, 71), (2, 2)])
def test_torchrun_is_told_of_every_ranks_failure(monkeypatch, tmp_path, code: int, seen: int) -> None:
    monkeypatch.setenv(launch.EXIT_CODE_FILE, str(tmp_path / "codes"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.report(code) == seen
    assert (tmp_path / "codes").read_text() == f"{code}\n"
