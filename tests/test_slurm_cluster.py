import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import EnvironmentProblem
from tests.slurm_cluster import packages, require_slurm
from tests.slurm_cluster.daemons import processes_with

REPOSITORY = Path(__file__).resolve().parents[1]
SHOW_GPUS = "#!/bin/bash\necho GPUs=$CUDA_VISIBLE_DEVICES\n"
SLEEP = "#!/bin/bash\nexec sleep 600\n"


def test_job_with_gpus_runs_and_sees_them(slurm, tmp_path):
    job = slurm.submit(SHOW_GPUS, "--partition=gpu", "--gres=gpu:2", f"--output={tmp_path}/log")
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"
    assert (tmp_path / "log").read_text() == "GPUs=0,1\n"


def test_job_over_its_memory_is_killed_and_its_log_says_so(slurm, tmp_path):
    script = f"#!/bin/bash\nexec {sys.executable} -c 'x = b\"x\" * (300 << 20); input()' < <(sleep 600)\n"
    job = slurm.submit(script, "--mem=100", f"--output={tmp_path}/log")
    assert slurm.wait_for_state(job)["JobState"] in ("FAILED", "OUT_OF_MEMORY")
    assert "exceeded memory limit" in (tmp_path / "log").read_text()


def test_controller_stopped_and_started_keeps_the_running_job(slurm):
    job = slurm.submit(SLEEP, "--output=/dev/null")
    slurm.wait_for_state(job, "RUNNING")
    slurm.stop_controller()
    assert "slurmctld" not in slurm.alive()
    slurm.start_controller()
    assert slurm.job(job)["JobState"] == "RUNNING"
    slurm.cancel_all()
    assert slurm.wait_for_state(job)["JobState"] == "CANCELLED"


@pytest.mark.long
def test_cluster_by_hand_starts_and_leaves_nothing_behind(tmp_path):
    require_slurm()
    folder = tmp_path / "cluster"

    def command(action: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "tests.slurm_cluster", action, str(folder), "--nodes", "1"]
        return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    started = command("start")
    assert started.returncode == 0, started.stderr
    conf = started.stdout.split()[1].removeprefix("SLURM_CONF=")
    ours = {"SLURM_CONF": conf, "PATH": packages.search_path()}
    subprocess.run(["sbatch", "--output=/dev/null"], input=SLEEP, text=True, env=ours, check=True, capture_output=True)
    try:
        assert "node1" in command("status").stdout
        assert "runs here already" in command("start").stderr
    finally:
        stopped = command("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not folder.exists()
    assert processes_with("SLURM_CONF", conf) == []


def test_folder_with_other_things_in_it_is_refused(tmp_path):
    require_slurm()
    (tmp_path / "thesis.tex").touch()
    words = [sys.executable, "-m", "tests.slurm_cluster", "start", str(tmp_path)]
    refused = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "is not empty" in refused.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_missing_package_skips_in_one_line_or_fails_where_it_must_be(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "SBIN", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(packages.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^no SLURM .* apt-get install .* munge .*slurmctld[^\n]*$"):
        require_slurm()
    monkeypatch.setenv(packages.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        require_slurm()
    with pytest.raises(EnvironmentProblem, match="mariadb-server"):
        packages.check_packages(accounting=True)
