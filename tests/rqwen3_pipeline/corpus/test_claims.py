import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from model import files
from model.errors import EnvironmentProblem, LockHeldError
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.claims import claim_path, claimed, claimed_in_turn, sweep_claims
from rqwen3_pipeline.corpus.lock import lock_folder

HOLD = """
import sys
from pathlib import Path
from rqwen3_pipeline.corpus.claims import claimed
from rqwen3_pipeline.settings import RunRoot
with claimed(RunRoot(Path(sys.argv[1])), sys.argv[2], [(sys.argv[3], sys.argv[4])]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(root):
    """Let another process claim a piece; returns the process."""
    children = []

    def start(stage, source, key):
        command = [sys.executable, "-c", HOLD, str(root.path), stage, source, key]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "held\n"
        return child

    yield start
    for child in children:
        child.communicate("")


def test_stage_with_a_piece_that_another_process_makes_is_refused_whole(root, config, folder, hold):
    lock = lock_folder(root, config, folder)
    holder = hold("raw", "pes2o", "00000")
    with pytest.raises(LockHeldError) as refused:
        run_stage("raw", root, config, lock, items_of("raw", config, lock))
    assert f"raw pes2o/00000: in use by another build (host {os.uname().nodename}, process {holder.pid})" in str(
        refused.value
    )
    assert refused.value.exit_code == 73
    assert not list((root.path / "raw").rglob("*.parquet"))


def test_stage_beside_another_process_on_other_pieces_goes_through(root, config, folder, hold):
    lock = lock_folder(root, config, folder)
    hold("raw", "fineweb_edu", "00001")
    (outcome,) = run_stage("raw", root, config, lock, [("fineweb_edu", "00000")])
    assert outcome.error is None


def test_stage_looks_at_a_current_piece_though_its_lock_is_held(root, config, folder, hold):
    lock = lock_folder(root, config, folder)
    run_stage("raw", root, config, lock, [("pes2o", "00000")])
    hold("raw", "pes2o", "00000")
    (outcome,) = run_stage("raw", root, config, lock, [("pes2o", "00000")])
    assert outcome.skipped


def test_claim_of_a_killed_process_is_free_and_swept(root, config, folder, hold):
    lock = lock_folder(root, config, folder)
    run_stage("raw", root, config, lock, [("pes2o", "00000")])
    for source in ("pes2o", "textbooks"):
        child = hold("raw", source, "00000")
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert claim_path(root, "raw", (source, "00000")).exists()
    outcomes = run_stage("raw", root, config, lock, items_of("raw", config, lock))
    assert not [outcome.error for outcome in outcomes if outcome.error]
    assert list((root.path / ".locks").iterdir()) == []


def test_sweep_leaves_a_held_claim_alone(root, hold):
    child = hold("raw", "pes2o", "00000")
    sweep_claims(root, "raw", [("pes2o", "00000")])
    with pytest.raises(LockHeldError, match=f"process {child.pid}"), claimed(root, "raw", [("pes2o", "00000")]):
        pass


def test_claims_of_more_pieces_than_files_may_be_open_are_held_all(root):
    code = """
import json, resource, sys
from pathlib import Path
from rqwen3_pipeline.corpus.claims import claimed
from rqwen3_pipeline.settings import RunRoot
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
items = [("pes2o", f"{i:05d}") for i in range(300)]
with claimed(RunRoot(Path(sys.argv[1])), "raw", items):
    print(json.dumps(len(list(Path(sys.argv[1], ".locks").iterdir()))))
"""
    done = subprocess.run([sys.executable, "-c", code, str(root.path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == 300


@pytest.mark.timeout(30)
def test_claim_in_turn_on_a_file_system_without_locks_is_refused_and_does_not_wait(root, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with pytest.raises(EnvironmentProblem, match="takes no file locks"), claimed_in_turn(root, "x", [("y", "z")]):
        pass
