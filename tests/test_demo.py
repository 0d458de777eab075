"""The newcomer's way: a fresh clone in a folder with a space in its name, `make demo`, and again."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.check_run_root import check

REPOSITORY = Path(__file__).resolve().parents[1]


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As from a shell: not as a part of the `make test` that may have started this."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RQWEN3_", "MAKE"))}
    return subprocess.run(["make", *arguments], cwd=clone, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("given", "end"),
    [([], 'cli --profile "demo" up'), (["PROFILE=samples", "PORT=3001"], '--profile "samples" up --port "3001"')],
)
def test_make_ui_names_a_port_only_if_the_user_did(monkeypatch, given, end):
    """A port is public on a login node, where `rqwen3 up` alone takes a private socket."""
    monkeypatch.delenv("PORT", raising=False)
    assert make(REPOSITORY, "--dry-run", "ui", *given).stdout.splitlines()[-1].rstrip().endswith(end)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_demo_in_a_fresh_clone_ends_well_and_its_every_claim_holds(tmp_path):
    clone = tmp_path / "a folder" / "rqwen3"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    done = make(clone, "demo")
    assert done.returncode == 0, done.stderr[-3000:]
    assert check(clone / "var" / "demo") == []
    again = make(clone, "demo")
    assert again.returncode == 0, again.stderr[-3000:]
    assert " made " not in again.stdout
    manifest = (clone / "var/demo/manifest.json").read_bytes()
    command = [".venv/bin/rqwen3", "--home", "var/other", "--workers", "3", "corpus", "build"]
    subprocess.run([*command, "--sources", "var/demo/demo_sources"], cwd=clone, check=True, capture_output=True)
    assert (clone / "var/other/manifest.json").read_bytes() == manifest
