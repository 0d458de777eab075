import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """No test inherits what another one's code set: offline switches, run roots, a Dagster home."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
