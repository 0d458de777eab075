"""Fixtures: the six sources on a loopback Hub, and a run that has locked FineWeb-Edu."""

import copy

import pytest

from rqwen3_pipeline.settings import RunRoot
from tests.loopback_hub import Repository, loopback_hub

from .hub_data import ALL_WEB, environment, publish, rqwen3


@pytest.fixture(scope="session")
def repositories(tmp_path_factory) -> dict[str, Repository]:
    """The six data sets, made once."""
    with loopback_hub() as server:
        publish(server, tmp_path_factory.mktemp("published"))
        return dict(server.repositories)


@pytest.fixture
def hub(repositories):
    with loopback_hub() as server:
        server.repositories.update(copy.deepcopy(repositories))
        yield server


@pytest.fixture
def root(tmp_path) -> RunRoot:
    return RunRoot(tmp_path / "root")


@pytest.fixture(scope="session")
def web_lock(tmp_path_factory, repositories) -> bytes:
    """The lock of all ten files of FineWeb-Edu, made once: the same on every Hub with these repositories."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "hub.toml").write_text(ALL_WEB)
    with loopback_hub() as server:
        server.repositories.update(repositories)
        locked = rqwen3(environment(server, folder), "sources", "lock")
    assert locked.returncode == 0, locked.stderr
    return RunRoot(folder / "root").lock.read_bytes()


@pytest.fixture
def web_files(tmp_path, hub, root, web_lock) -> dict[str, str]:
    """The environment of a run that has locked all ten files of FineWeb-Edu."""
    (tmp_path / "hub.toml").write_text(ALL_WEB)
    root.path.mkdir()
    root.lock.write_bytes(web_lock)
    return environment(hub, tmp_path)
