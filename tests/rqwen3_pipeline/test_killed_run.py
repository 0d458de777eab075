"""`rqwen3 run` killed with SIGKILL, process group and all, at moments spread over its whole length."""

import os
import random
import signal
import subprocess
import time

import pytest
import torch

from model.files import read_json, read_jsonl
from tests.rqwen3_pipeline.site import Site, hashes, make_site

KILLS = 8


def final_state(site: Site) -> dict:
    return torch.load(site.home / "experiments/tiny/checkpoints/final.pt", weights_only=True)


def run_and_kill(site: Site, after_s: float) -> bool:
    """Start the run, kill its whole process group after a while; True if it had ended well before."""
    process = subprocess.Popen(
        site.command("run", "--sources", str(site.sources)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=after_s) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_run_killed_anywhere_and_started_again_ends_with_the_same_bytes(tmp_path):
    (tmp_path / "straight").mkdir()
    (tmp_path / "killed").mkdir()
    straight, killed = make_site(tmp_path / "straight"), make_site(tmp_path / "killed")
    began = time.monotonic()
    done = straight.run()
    whole_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    draw = random.Random(7)
    ended_well = [run_and_kill(killed, draw.uniform(0.15, 0.6) * whole_s) for _ in range(KILLS)]
    assert ended_well.count(False) >= 2, "too few of the kills struck"
    assert killed.run().returncode == 0
    corpus = ("manifest.json", "sources.lock.json", "tokenizer.json", "filtered/", "digests/", "survivors/", "tokens/")
    of_corpus = [{k: v for k, v in hashes(s.home).items() if k.startswith(corpus)} for s in (straight, killed)]
    assert of_corpus[0] == of_corpus[1]
    one, other = final_state(straight), final_state(killed)
    for name, tensor in one["model_state_dict"].items():
        assert torch.equal(tensor, other["model_state_dict"][name]), name
    assert one["loss_history"] == other["loss_history"]
    assert not list(killed.home.rglob("*.tmp"))
    ledger = read_jsonl(killed.home / "experiments/tiny/ledger.jsonl")
    assert ledger[-1]["stop_reason"] == "finished"
    assert read_json(killed.home / "evidence/tiny/evidence.json")["verdict"]
