"""`rqwen3 run` whole, from the six data sets on the loopback Hub to the evidence report."""

import pytest

from model.files import read_json
from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.settings import SOURCES
from tests.rqwen3_pipeline.site import PROFILE

from .hub_data import environment, halves, published, rqwen3


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_run_from_the_hub_to_the_report_and_again_without_a_request(tmp_path, hub, root):
    (tmp_path / "hub.toml").write_text(PROFILE.replace('origin = "folder"', 'origin = "hub"'))
    env = environment(hub, tmp_path)
    done = rqwen3(env, "run", timeout_s=1200)
    assert done.returncode == 0, done.stderr
    lock = read_lock(root)
    assert sorted(lock.sources) == sorted(SOURCES)
    for source, pin in lock.pins.items():
        for file in lock.files(source):
            assert root.raw(source, file.name).read_bytes() == published(hub, pin.dataset)[file.path]
    manifest = read_json(root.manifest)
    assert all(manifest["sources"][source]["documents"] for source in SOURCES)
    assert (root.path / "evidence" / "tiny" / "index.html").is_file()
    assert not halves(tmp_path)
    hub.requests.clear()
    assert rqwen3(env, "run", timeout_s=1200).returncode == 0
    assert hub.requests == []
