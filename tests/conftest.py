import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests.slurm_cluster import ClusterSettings, SlurmCluster, require_slurm

# How long an example takes says nothing on a busy machine. The same commit gets the same answer each time;
# `--hypothesis-profile explore` draws other examples.
BUSY = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("repeatable", BUSY, derandomize=True)
hypothesis.settings.register_profile("explore", BUSY, max_examples=500)
hypothesis.settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in whatever a shell's script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {number: handler for number in signal.valid_signals() if (handler := signal.getsignal(number)) is not None}
"""Before any test ran."""
CLUSTERS = {"slurm", "slurm_with_accounting"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a cluster: such tests mostly wait, so they run beside the others."""
    for item in items:
        if CLUSTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """No test inherits what another one's code set: offline switches, run roots, a Dagster home, signal handlers.

    A trainer run in the tests' process, by a test or by a fixture of a module, ends with signals ignored,
    and what is ignored is so in every program that a later test starts.
    """
    before = dict(os.environ)
    _restore_handlers()
    yield
    os.environ.clear()
    os.environ.update(before)
    _restore_handlers()


def _restore_handlers() -> None:
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real cluster of three nodes with two fake GPUs each, without accounting."""
    require_slurm()
    with SlurmCluster.temporary() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_with_accounting() -> Iterator[SlurmCluster]:
    """The same with sacct, accounts, limits, and the QoS `gpu-long` and `gpu-short`."""
    require_slurm(accounting=True)
    with SlurmCluster.temporary(ClusterSettings(accounting=True)) as cluster:
        yield cluster
