"""The job scripts for use by hand, without a cluster: their environment, and the form of their signals."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rqwen3_pipeline.slurm.cluster import load_cluster, wish
from rqwen3_pipeline.slurm.options import JobOptions
from rqwen3_pipeline.slurm.script import render
from tests.job_script import signal_problems

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((REPOSITORY / "sbatch").glob("*.sbatch"))
USE = "set -euo pipefail\nsource sbatch/env.sh || exit\n"
MODULE = """
module() {
  [[ $2 == good/1.0 ]] && LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$2
  false_ok=$UNSET_AS_MODULE_SYSTEMS_DO
}
export -f module
"""


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run lines of bash in the checkout, with this interpreter's environment as the virtual one."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RQWEN3_", "HF_"))}
    given |= {"RQWEN3_VENV": sys.prefix, **environment}
    return subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, env=given, capture_output=True, text=True, check=False
    )


def test_environment_says_what_it_found_and_sets_the_caches_on_scratch(tmp_path):
    done = shell(USE + "env", RQWEN3_SCRATCH=str(tmp_path), SLURM_CPUS_PER_TASK="3", HF_HOME="/kept")
    assert done.returncode == 0, done.stderr
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if re.match(r"\w+=", line))
    (cache,) = tmp_path.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert values["TRITON_CACHE_DIR"] == f"{cache}/triton"
    assert values["HF_HOME"] == "/kept"
    assert (values["PYTHONUNBUFFERED"], values["OMP_NUM_THREADS"]) == ("1", "3")
    assert values["PATH"].startswith(f"{sys.prefix}/bin:")
    assert f"env: project {REPOSITORY}, Python {sys.version.split()[0]} of {sys.prefix}" in done.stdout


def test_environment_whose_virtual_one_is_broken_refuses_with_the_way_out(tmp_path):
    done = shell(USE + "echo on", RQWEN3_VENV=str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/bin/python does not run" in done.stderr
    assert "make install" in done.stderr
    assert "on\n" not in done.stdout


def test_environment_outside_of_a_checkout_refuses_with_the_way_out(tmp_path):
    done = shell(USE, RQWEN3_PROJECT=str(tmp_path))
    assert done.returncode == 1
    assert "Submit from the checkout" in done.stderr


def test_modules_are_loaded_outside_strict_mode_which_is_there_again_afterwards(tmp_path):
    after = '[[ $- == *e* && $- == *u* ]] && echo "loaded $LOADEDMODULES"'
    done = shell(MODULE + USE + after, RQWEN3_MODULES="good/1.0", RQWEN3_SCRATCH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "env: modules good/1.0" in done.stdout
    assert "loaded good/1.0" in done.stdout


def test_module_that_is_not_there_refuses_though_the_command_answers_well():
    done = shell(MODULE + USE, RQWEN3_MODULES="good/1.0 bad/2.0")
    assert done.returncode == 1
    assert "module avail" in done.stderr


def test_modules_asked_for_without_a_module_system_are_refused():
    done = shell("unset -f module\n" + USE, RQWEN3_MODULES="good/1.0")
    assert done.returncode == 1
    assert "no module command" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_job_scripts_are_valid_bash_and_read_the_environment(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert 'sbatch/env.sh" || exit' in script.read_text()
    assert "#SBATCH --no-requeue" in script.read_text()


def test_train_script_lets_the_warning_reach_the_trainer():
    assert signal_problems((REPOSITORY / "sbatch/train.sbatch").read_text()) == []


PYTHON = """#!/bin/sh
# The trainer says what it was told; everything else runs.
case "$*" in *"-m model.pretrain"*) printf '%s\\n' "$@" >"$SAID" ;; *) exec {python} "$@" ;; esac
"""


def told_to_the_trainer(folder: Path, squeue: str, **environment: str) -> list[str]:
    """What train.sbatch starts the trainer with, on a node whose squeue does as told; its waits last a second."""
    stubs = {
        "python": PYTHON.format(python=sys.executable),
        "squeue": f"#!/bin/sh\n{squeue}\n",
        "timeout": '#!/bin/sh\nshift\nexec /usr/bin/timeout 1 "$@"\n',
        "sleep": "#!/bin/sh\n",
        "rqwen3": "#!/bin/sh\nexit 1\n",
    }
    (folder / "bin").mkdir()
    for name, text in stubs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    given = {"RQWEN3_VENV": str(folder), "RQWEN3_HOME": str(folder / "home"), "SAID": str(folder / "said")}
    given |= {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_ID": "7", "RQWEN3_SCRATCH": str(folder)}
    done = shell("bash sbatch/train.sbatch demo", **given, **environment)
    assert done.returncode == 0, done.stderr
    return (folder / "said").read_text().splitlines()


def after(name: str, words: list[str]) -> str | None:
    return words[words.index(name) + 1] if name in words else None


@pytest.mark.parametrize(
    ("squeue", "limit_s"),
    [
        ("date -d '+30 minutes' +%FT%T", 1800),
        ("[ \"$TZ\" = UTC ] && date -d '+30 minutes' +%FT%T", 1800),  # elsewhere an hour may come twice
        ("exec /bin/sleep 60", 24 * 3600),  # the controller does not answer: the limit that the script asks for
        ("exit 1", 24 * 3600),
        ("exit 0", 24 * 3600),
        ("echo N/A", None),
    ],
)
def test_train_script_tells_the_trainer_the_time_that_slurm_knows_else_what_was_asked_for(tmp_path, squeue, limit_s):
    told = after("--time-limit-s", told_to_the_trainer(tmp_path, squeue))
    assert told is None if limit_s is None else limit_s - 60 < float(str(told)) <= limit_s


def test_train_script_takes_the_end_of_the_job_from_its_environment(tmp_path):
    words = told_to_the_trainer(tmp_path, "exit 1", SLURM_JOB_END_TIME=str(int(time.time()) + 900))
    assert 840 < float(str(after("--time-limit-s", words))) <= 900


def test_train_script_gives_no_attempt_the_number_of_one_that_was_killed(tmp_path):
    folder = tmp_path / "home" / "experiments" / "demo"
    folder.mkdir(parents=True)
    (folder / "LOCK").write_text(json.dumps({"submission": 1, "attempt": 1, "pid": 1, "host": "gone"}))
    words = told_to_the_trainer(tmp_path, "exit 1")
    assert (after("--submission", words), after("--attempt", words)) == ("1", "2")


def test_train_script_in_the_form_that_loses_the_signal_is_refused():
    script = (REPOSITORY / "sbatch/train.sbatch").read_text()
    foreground = script.replace('"$@" &\n', '"$@"\n')
    assert foreground != script
    assert "kills the shell" in signal_problems(foreground)[0]
    assert "no trap for USR1" in signal_problems(re.sub(r"trap .* USR1\n", "", script))[0]
    assert "no trap for HUP" in signal_problems(script, ["--signal=B:HUP@60"])[0]
    assert "goes to the steps" in signal_problems(script, ["--signal=USR1@60"])[0]
    assert "no --signal" in signal_problems(script.replace("#SBATCH --signal", "# --signal"))[0]
    assert "does not wait" in signal_problems(re.sub(r"\bwait\b", "true", script))[0]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "sbatch" / "clusters").glob("*.toml")), ids=lambda path: path.stem
)
def test_example_sites_are_valid_and_send_training_to_gpus(path):
    site = load_cluster(path)
    asked = wish([{"slurm/kind": "gpu", "slurm/stop": "save"}], {}, site)
    assert not asked.local
    assert asked.options["gres"].startswith("gpu")
    assert asked.options["time"] == "1-00:00:00"
    assert site.env_file is None or site.env_file == REPOSITORY / "sbatch" / "env.sh"


def test_script_that_the_launcher_makes_lets_the_warning_reach_the_trainer(tmp_path):
    options = JobOptions(job_name="x", time="10")
    script = render(["python", "-m", "dagster", "api", "execute_run", "{}"], options, stop_file=tmp_path / "stop")
    assert signal_problems(script, options.arguments()) == []
    foreground = script.replace('"${program[@]}" &\n', '"${program[@]}"\n')
    assert foreground != script
    assert "kills the shell" in signal_problems(foreground, options.arguments())[0]
