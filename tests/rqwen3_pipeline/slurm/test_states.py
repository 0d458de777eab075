import pytest
from hypothesis import given
from hypothesis import strategies as st

from rqwen3_pipeline.slurm.states import COMPACT, PHASES, Phase, State, never_starts, parse_state


def test_every_state_has_a_phase_and_compact_codes_name_each_but_unknown():
    assert set(PHASES) == set(State)
    assert set(COMPACT.values()) == set(State) - {State.UNKNOWN}


@pytest.mark.parametrize("state", [state for state in State if state is not State.UNKNOWN])
def test_state_in_its_long_and_compact_form_is_the_same(state):
    compact = next(code for code, named in COMPACT.items() if named is state)
    assert parse_state(state.value) is parse_state(compact) is parse_state(f" {state.value.lower()}\n") is state


@pytest.mark.parametrize(
    ("text", "state", "phase"),
    [
        ("CANCELLED by 54321", State.CANCELLED, Phase.FAILED),
        ("CANCELLED+", State.CANCELLED, Phase.FAILED),
        ("OUT_OF_ME+", State.OUT_OF_MEMORY, Phase.FAILED),
        ("TIMEOUT", State.TIMEOUT, Phase.FAILED),
        ("NODE_FAIL", State.NODE_FAIL, Phase.FAILED),
        ("COMPLETED", State.COMPLETED, Phase.SUCCEEDED),
        ("RUNNING,COMPLETING", State.COMPLETING, Phase.ENDING),
        ("COMPLETED+COMPLETING", State.UNKNOWN, Phase.UNKNOWN),
        ("REQUEUED", State.REQUEUED, Phase.PENDING),
        ("SUSPENDED", State.SUSPENDED, Phase.RUNNING),
        ("REVOKED", State.REVOKED, Phase.UNKNOWN),
        ("SOMETHING_NEW", State.UNKNOWN, Phase.UNKNOWN),
        ("RE+", State.UNKNOWN, Phase.UNKNOWN),
        ("", State.UNKNOWN, Phase.UNKNOWN),
    ],
)
def test_state_as_slurm_may_print_it_is_understood(text, state, phase):
    assert parse_state(text) is state
    assert state.phase is phase


@given(st.text(max_size=40))
def test_any_text_is_a_state_and_only_known_words_are_an_end(text):
    state = parse_state(text)
    if state.phase.ended:
        first = text.strip().upper().replace("|", " ").replace("&", " ").replace(",", " ").split()[0]
        assert first in COMPACT or state.value.startswith(first.rstrip("+")[:3])


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionTimeLimit",
        "PartitionNodeLimit",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "JobHeldAdmin",
        "QOSMaxWallDurationPerJobLimit",
        "QOSMaxGRESPerJob",
        "AssocMaxCpuPerJobLimit",
        "QOSMaxMemoryPerNode",
        "launch failed requeued held",
        "launch_failed_requeued_held",
        "(QOSMinGRES)",
    ],
)
def test_reason_that_no_waiting_mends_never_starts(reason):
    assert never_starts(reason)


@pytest.mark.parametrize(
    "reason",
    [
        *("", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobHeldUser", "ReqNodeNotAvail"),
        *("QOSMaxJobsPerUserLimit", "QOSMaxCpuPerUserLimit", "AssocGrpGRES", "QOSGrpNodeLimit", "Licenses"),
        *("PartitionDown", "PartitionInactive", "Nodes required for job are DOWN, DRAINED", "Reservation"),
    ],
)
def test_reason_that_may_pass_is_waited_for(reason):
    assert not never_starts(reason)
