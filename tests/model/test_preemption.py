import os
import signal
from pathlib import Path

import pytest

from model.preemption import SIGNALS, StopWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(clock: Clock, **values: object) -> StopWatch:
    return StopWatch(clock=clock, started=clock.now, **values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_any_number_of_them_only_set_the_flag(number: signal.Signals) -> None:
    stop = StopWatch()
    stop.install()
    assert not stop.should_stop()
    for _ in range(3):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.should_stop()
    assert stop.reason == number.name


def test_signal_that_comes_while_processes_agree_that_there_is_none_is_kept() -> None:
    def agree(reason: str | None) -> str | None:
        if reason is None:
            os.kill(os.getpid(), signal.SIGUSR1)
        return reason

    stop = StopWatch(agree=agree)
    stop.install()
    assert not stop.should_stop()  # as the others were told
    assert stop.should_stop()
    assert stop.reason == "SIGUSR1"


@pytest.mark.parametrize(
    ("limit_s", "lead_s", "save_s", "expected"),
    [(86_400, 300, 0, 300), (60, 300, 0, 20), (60, 10, 0, 10), (60, 10, 16, 24), (86_400, 300, 400, 600)],
)
def test_lead_is_a_third_of_the_limit_at_most_and_a_save_at_least(
    limit_s: float, lead_s: float, save_s: float, expected: float
) -> None:
    stop = StopWatch(time_limit_s=limit_s, lead_s=lead_s)
    stop.save_s = save_s
    assert stop.lead() == expected


def test_deadline_stops_at_the_lead_before_the_end() -> None:
    clock = Clock()
    stop = watch(clock, time_limit_s=90.0, lead_s=10.0)
    clock.now += 79.9
    assert not stop.should_stop()
    clock.now += 0.2
    assert stop.should_stop()
    assert stop.reason == "deadline"


def test_work_is_begun_only_if_it_ends_before_the_save() -> None:
    clock = Clock()
    stop = watch(clock, time_limit_s=90.0, lead_s=10.0)
    clock.now += 50.0  # 30 s are left before the lead
    assert stop.has_time_for(19.0)
    assert not stop.has_time_for(21.0)
    assert not stop.should_stop()
    assert watch(clock).has_time_for(1e9)


def test_signals_that_come_while_the_process_leaves_are_ignored() -> None:
    stop = StopWatch()
    stop.install()
    stop.ignore()
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert stop.reason is None


def test_no_limit_never_ends() -> None:
    clock = Clock()
    stop = watch(clock)
    clock.now += 1e9
    assert not stop.should_stop()


def test_stop_file_is_seen_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    stop = watch(clock, stop_file=tmp_path / "STOP")
    assert not stop.should_stop()
    (tmp_path / "STOP").touch()
    clock.now += 1.0
    assert stop.should_stop()
    assert stop.reason == "stop_file"


def test_another_parent_stops() -> None:
    assert not watch(Clock(), parent=os.getppid()).should_stop()
    stop = watch(Clock(), parent=os.getppid() + 1)
    assert stop.should_stop()
    assert stop.reason == "parent_gone"
