"""The decision over all histories, and the sentences a person reads."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rqwen3_pipeline.experiments.policy import RETRIED, Action, Attempt, Facts, Outcome, Policy, decide

MAX_STEPS = 40
POLICY = Policy(retries=3, back_off_s=60.0, idle_slices=2)
NOT_LIFTED = [Outcome.OUT_OF_MEMORY, Outcome.DISK_FULL, Outcome.NOT_FINITE, Outcome.ERROR, Outcome.CANCELLED]


def attempt(submission: int = 1, number: int = 1, outcome: Outcome = Outcome.SAVED, **more) -> Attempt:
    values = {"from_step": 0, "reached_step": 10, "saved_step": 10, "ended_s": 1000.0, "detail": "why", **more}
    return Attempt(submission=submission, attempt=number, outcome=outcome, **values)


def facts(*attempts: Attempt, **more) -> Facts:
    return Facts(**{"experiment": "e", "finished": False, "attempts": attempts, "now_s": 1e9, **more})


@st.composite
def endings(draw):
    """How an attempt that begins at some step may end: outcome, steps trained, steps saved of these."""
    outcome = draw(st.sampled_from([o for o in Outcome if o is not Outcome.FINISHED]))
    trained = draw(st.none() | st.integers(0, 15))
    saved = draw(st.integers(0, trained)) if trained and outcome is not Outcome.CANNOT_START else 0
    return outcome, trained, saved


@given(st.lists(endings(), min_size=1, max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
@settings(max_examples=400, deadline=None)
def test_decide_over_any_history_ends_and_never_submits_the_same_twice(history, interruptions):
    """Plays a run: each SUBMIT meets the next ending of the history, time passes at each WAIT."""
    attempts: list[Attempt] = []
    now_s, step, submitted, idle = 0.0, 0, [(0, 0)], 0
    ended = iter(history)
    for interrupted in (*interruptions, *[False] * 300):
        known = facts(*attempts, finished=step >= MAX_STEPS, now_s=now_s)
        if interrupted:  # whatever is unclear at this tick, nothing is submitted
            for unclear in ({"live": ("job 7",)}, {"scheduler_problem": "timed out"}, {"stopped": "by me"}):
                assert decide(dataclasses.replace(known, **unclear), POLICY).action is not Action.SUBMIT
        decision = decide(known, POLICY)
        if decision.action is Action.STOP:
            for later in (0.0, 1e3, 1e9):
                assert decide(dataclasses.replace(known, now_s=now_s + later), POLICY).action is Action.STOP
            assert decision.reason
            return
        if decision.action is Action.WAIT:
            now_s += 30.0
            continue
        assert step < MAX_STEPS
        place = (decision.submission, decision.attempt)
        assert place > submitted[-1]
        assert place[0] <= submitted[-1][0] + 1
        submitted.append(place)
        outcome, trained, saved = next(ended, (Outcome.SAVED, 0, 0))
        now_s += 100.0
        reached = None if trained is None else min(step + trained, MAX_STEPS)
        after = min(step + saved, MAX_STEPS)
        attempts.append(attempt(*place, outcome, from_step=step, reached_step=reached, saved_step=after, ended_s=now_s))
        idle = 0 if after > step else idle + 1
        assert idle <= POLICY.retries + 1
        step = after
    pytest.fail("the chain did not come to an end")


@given(st.lists(endings(), max_size=8), st.floats(0, 1e10))
def test_decide_of_a_finished_run_never_trains_on(history, now_s):
    attempts = [attempt(1, n, e[0], saved_step=e[2]) for n, e in enumerate(history, 1)]
    assert decide(facts(*attempts, finished=True, now_s=now_s), POLICY).action is Action.STOP


def test_decide_without_any_attempt_submits_the_first_unless_something_is_missing():
    decision = decide(facts(), POLICY)
    assert (decision.action, decision.submission, decision.attempt) == (Action.SUBMIT, 1, 1)
    decision = decide(facts(first_problem="2 GiB free, 9 needed"), POLICY)
    assert decision.action is Action.STOP
    assert decision.reason == "2 GiB free, 9 needed"


@pytest.mark.parametrize("outcome", NOT_LIFTED)
def test_decide_after_a_failure_that_repeats_itself_stops_at_once_and_says_how_to_go_on(outcome):
    decision = decide(facts(attempt(3, 1, outcome)), POLICY)
    assert decision.action is Action.STOP
    assert f"e.03 ended {outcome}: why" in decision.reason
    assert decision.reason.endswith("rqwen3 experiment resume e")


def test_decide_after_a_failure_names_the_log_and_the_experiment_to_vary():
    decision = decide(facts(attempt(3, 1, Outcome.NOT_FINITE, detail="loss nan.", log="e/logs/3.log")), POLICY)
    assert "e.03 ended not finite: loss nan (log: e/logs/3.log). Look" in decision.reason
    assert "rqwen3 experiment new NAME --from e --set training.learning_rate=VALUE" in decision.reason


@pytest.mark.parametrize("outcome", NOT_LIFTED)
def test_decide_after_a_stop_that_was_lifted_submits_again(outcome):
    decision = decide(facts(attempt(3, 1, outcome, saved_step=0), forgiven=(3, 1)), POLICY)
    place = (4, 1) if outcome is Outcome.CANCELLED else (3, 2)  # whose number the ledger may call done
    assert (decision.action, decision.submission, decision.attempt) == (Action.SUBMIT, *place)
    again = decide(facts(attempt(3, 1, outcome), attempt(3, 2, outcome), forgiven=(3, 1)), POLICY)
    assert again.action is Action.STOP


@pytest.mark.parametrize("outcome", sorted(RETRIED))
def test_decide_after_a_lost_job_tries_again_with_a_growing_wait_and_a_limit(outcome):
    waits = []
    for failures in range(1, 4):
        lost = [attempt(2, n, outcome, reached_step=None, saved_step=0) for n in range(1, failures + 1)]
        ticks = range(1000, 5000)
        answers = [decide(facts(*lost, now_s=float(now)), POLICY) for now in ticks]
        submit = next(answer for answer in answers if answer.action is Action.SUBMIT)
        assert (submit.submission, submit.attempt) == (2, failures + 1)
        waits.append(sum(answer.action is Action.WAIT for answer in answers))
    assert waits == [60, 120, 240]
    lost = [attempt(2, n, outcome, reached_step=None, saved_step=0) for n in range(1, 5)]
    assert decide(facts(*lost), POLICY).action is Action.STOP


def test_decide_with_a_clock_that_runs_ahead_does_not_wait_for_it():
    ahead = attempt(1, 1, Outcome.LOST, ended_s=5e9)
    assert decide(facts(ahead, now_s=1e9), POLICY).action is Action.SUBMIT


def test_decide_after_slices_that_train_and_save_nothing_stops_for_want_of_progress():
    first = attempt(1, 1, Outcome.SAVED, from_step=0, reached_step=10, saved_step=10)
    idle = attempt(2, 1, Outcome.TIMED_OUT, from_step=10, reached_step=14, saved_step=10)
    assert decide(facts(first, idle), POLICY).action is Action.SUBMIT
    decision = decide(facts(first, idle, dataclasses.replace(idle, attempt=2)), POLICY)
    assert decision.action is Action.STOP
    assert "no progress: 2 slices in a row trained and saved nothing beyond step 10" in decision.reason


def test_decide_does_not_count_a_slice_that_never_reached_a_step_as_one_without_progress():
    idle = attempt(1, 1, Outcome.TIMED_OUT, from_step=0, reached_step=4, saved_step=0)
    unborn = attempt(1, 2, Outcome.LOST, from_step=0, reached_step=None, saved_step=0)
    assert decide(facts(idle, unborn), POLICY).action is Action.SUBMIT


def test_decide_with_a_ledger_that_finished_but_no_final_checkpoint_stops():
    assert "no whole final.pt" in decide(facts(attempt(1, 1, Outcome.FINISHED)), POLICY).reason
