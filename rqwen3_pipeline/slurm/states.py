"""What SLURM's words for a job's state and reason mean, as a table.

Written from the state codes of `squeue` and `sacct` of SLURM 20.11 to 25.x. A word that is not in the
table is a value (`UNKNOWN`), never an exception and never an end: a newer SLURM may say something
new of a job that runs.
"""

import re
from enum import Enum


class Phase(Enum):
    """What a state means for whoever waits for the job."""

    PENDING = "pending"
    """It waits for its start, or for a second one."""
    RUNNING = "running"
    """Its processes are there, though perhaps suspended."""
    ENDING = "ending"
    """Its processes are being ended; the outcome is not final."""
    SUCCEEDED = "succeeded"
    """It has ended with exit code 0."""
    FAILED = "failed"
    """It has ended in any other way."""
    UNKNOWN = "unknown"
    """SLURM's word is not known here, or says nothing of the job's fate."""

    @property
    def ended(self) -> bool:
        """Whether the job is over for good."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)

    @property
    def alive(self) -> bool:
        """Whether SLURM has the job, to start or to end it."""
        return self in (Phase.PENDING, Phase.RUNNING, Phase.ENDING)


class State(Enum):
    """A job's state, as SLURM spells it."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    POWER_UP_NODE = "POWER_UP_NODE"
    EXPEDITING = "EXPEDITING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"
    COMPLETED = "COMPLETED"
    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    TIMEOUT = "TIMEOUT"
    REVOKED = "REVOKED"
    UPDATE_DB = "UPDATE_DB"
    UNKNOWN = "UNKNOWN"

    @property
    def phase(self) -> Phase:
        """What the state means."""
        return PHASES[self]


PHASES = {
    State.PENDING: Phase.PENDING,
    State.CONFIGURING: Phase.PENDING,
    State.REQUEUED: Phase.PENDING,
    State.REQUEUE_FED: Phase.PENDING,
    State.REQUEUE_HOLD: Phase.PENDING,
    State.RESV_DEL_HOLD: Phase.PENDING,
    State.SPECIAL_EXIT: Phase.PENDING,
    State.POWER_UP_NODE: Phase.PENDING,
    State.EXPEDITING: Phase.PENDING,
    State.RUNNING: Phase.RUNNING,
    State.RESIZING: Phase.RUNNING,
    State.SIGNALING: Phase.RUNNING,
    State.STOPPED: Phase.RUNNING,
    State.SUSPENDED: Phase.RUNNING,
    State.COMPLETING: Phase.ENDING,
    State.STAGE_OUT: Phase.ENDING,
    State.COMPLETED: Phase.SUCCEEDED,
    State.BOOT_FAIL: Phase.FAILED,
    State.CANCELLED: Phase.FAILED,
    State.DEADLINE: Phase.FAILED,
    State.FAILED: Phase.FAILED,
    State.LAUNCH_FAILED: Phase.FAILED,
    State.NODE_FAIL: Phase.FAILED,
    State.OUT_OF_MEMORY: Phase.FAILED,
    State.PREEMPTED: Phase.FAILED,
    State.RECONFIG_FAIL: Phase.FAILED,
    State.TIMEOUT: Phase.FAILED,
    # Another cluster of a federation runs the job under the same id, or only a record is being written.
    State.REVOKED: Phase.UNKNOWN,
    State.UPDATE_DB: Phase.UNKNOWN,
    State.UNKNOWN: Phase.UNKNOWN,
}

COMPACT = {
    "PD": State.PENDING,
    "CF": State.CONFIGURING,
    "RQ": State.REQUEUED,
    "RF": State.REQUEUE_FED,
    "RH": State.REQUEUE_HOLD,
    "RD": State.RESV_DEL_HOLD,
    "SE": State.SPECIAL_EXIT,
    "PU": State.POWER_UP_NODE,
    "EX": State.EXPEDITING,
    "R": State.RUNNING,
    "RS": State.RESIZING,
    "SI": State.SIGNALING,
    "ST": State.STOPPED,
    "S": State.SUSPENDED,
    "CG": State.COMPLETING,
    "SO": State.STAGE_OUT,
    "CD": State.COMPLETED,
    "BF": State.BOOT_FAIL,
    "CA": State.CANCELLED,
    "DL": State.DEADLINE,
    "F": State.FAILED,
    "LF": State.LAUNCH_FAILED,
    "NF": State.NODE_FAIL,
    "OOM": State.OUT_OF_MEMORY,
    "PR": State.PREEMPTED,
    "RC": State.RECONFIG_FAIL,
    "TO": State.TIMEOUT,
    "RV": State.REVOKED,
    "UD": State.UPDATE_DB,
}

WORTH_ANOTHER_TRY = frozenset(
    {State.NODE_FAIL, State.PREEMPTED, State.BOOT_FAIL, State.LAUNCH_FAILED, State.RECONFIG_FAIL}
)
"""Ends that say nothing against the job: the site took the node away."""

_NEVER_STARTS = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|BadConstraints|DependencyNeverSatisfied|JobHeldAdmin|DeadLine"
    r"|InvalidAccount|InvalidQOS|QOSNotAllowed|AccountNotAllowed"
    r"|(QOS|Assoc)Max\w*Per(Job|Node)\w*|MaxMemPerLimit|QOSMin\w+"
    r"|launch_failed_requeued_held|launch failed,? requeued held",
    re.IGNORECASE,
)


def parse_state(text: str) -> State:
    """The state that SLURM's text stands for.

    Takes the long and the compact form, with what follows (`CANCELLED by 1000`, `RUNNING,COMPLETING`),
    and names that a column has cut (`CANCELLED+`, `OUT_OF_ME+`).

    Returns:
        `State.UNKNOWN` for a word that no table has.
    """
    words = [word for word in re.split(r"[\s,|&]+", text.strip().upper()) if word]
    if not words:
        return State.UNKNOWN
    found = [_named(word) for word in ([words[0]] if "BY" in words else words)]
    ending = [state for state in found if state.phase is Phase.ENDING]
    return ending[0] if ending else found[0]


def _named(word: str) -> State:
    if word in State.__members__:
        return State[word]
    if word in COMPACT:
        return COMPACT[word]
    if word.endswith("+"):
        fitting = [state for state in State if state.value.startswith(word[:-1])]
        if len(fitting) == 1:
            return fitting[0]
    return State.UNKNOWN


def never_starts(reason: str) -> bool:
    """Whether a pending job's reason means that it can't start as it was asked for.

    A limit that others' jobs use up, a node that is down, a job that its owner holds: those may end.
    """
    return _NEVER_STARTS.fullmatch(reason.strip().strip("()")) is not None
