"""The batch script: its text against a golden file, and what it does under bash with programs that save."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from model.errors import ConfigError
from rqwen3_pipeline.slurm.options import JobOptions
from rqwen3_pipeline.slurm.script import render

GOLDEN = Path(__file__).with_name("golden_script.sh")
PATIENCE_S = 60.0
OPTIONS = JobOptions(job_name="dg-1234abcd-1", comment="dagster:1234abcd", time="10")

TRAINER = """
import os, pathlib, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
folder = pathlib.Path(sys.argv[1])
parent = os.getppid()
(folder / "trainer").write_text(str(os.getpid()))
while not stop and not os.path.exists(os.environ["RQWEN3_STOP_FILE"]) and os.getppid() == parent:
    time.sleep(0.05)
time.sleep(float(os.environ.get("SAVE_S", "0.2")))
with (folder / "saves").open("a") as saves:
    saves.write("saved\\n")
sys.exit(75)
"""
"""Saves when it is told by TERM, by the stop file, or by its parent's death; counts its saves."""

WORKER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
sys.exit(child.wait())
"""
"""Waits for a trainer that is its child, and dies of signals at once."""

SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]))"


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def write(folder: Path, program: list[str], **more) -> Path:
    more = {"stop_file": folder / "stop it's", "save_budget_s": 30, "folder": folder, **more}
    script = folder / "job.sh"
    script.write_text(render([sys.executable, *program], OPTIONS, **more))
    return script


def start(script: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()


def ended(process: psutil.Process) -> bool:
    """Gone, or a zombie where nobody collects orphans."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_script_of_a_run_is_the_golden_one():
    text = render(
        ["/venv/bin/python", "-m", "dagster", "api", "execute_run", '{"it\'s": "json"}'],
        OPTIONS,
        stop_file=Path("/home/ann/my runs/attempt-1.stop"),
        env_file=Path("/home/ann/env.sh"),
        folder=Path("/home/ann/my runs"),
        code=Path("/home/ann/code/0123"),
        environment={"RQWEN3_HOME": "/home/ann/my runs"},
    )
    assert text == GOLDEN.read_text(), f"to accept it: write the text of this call to {GOLDEN.name}"


def test_script_is_valid_bash_and_asks_for_nothing_beyond_4_2(folder):
    script = write(folder, ["-c", "pass"])
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    text = script.read_text()
    assert not any(newer in text for newer in ("EPOCHSECONDS", "${x@Q}", "wait -n", "mapfile -d", "local -n"))


@pytest.mark.parametrize("code", [0, 1, 3, 75])
def test_exit_code_of_the_program_is_the_jobs(folder, code):
    job = start(write(folder, ["-c", f"raise SystemExit({code})"]))
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == code
    assert f"exit code {code}" in said.splitlines()[-1]


def test_program_that_used_cpu_and_memory_is_told_so(folder):
    work = "import time\nx = bytearray(200 << 20)\nend = time.process_time() + 3\nwhile time.process_time() < end: pass"
    said, _ = start(write(folder, ["-c", work])).communicate(timeout=PATIENCE_S)
    line = said.splitlines()[-1]
    cpu_s = int(line.split("CPU ")[1].split()[0])
    peak_mib = int(line.split("peak memory ")[1].split()[0])
    assert 3 <= cpu_s <= 5
    assert 200 <= peak_mib <= 260
    assert sorted(path.name for path in folder.iterdir()) == ["job.sh"]


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGUSR1, "shell"),
        (signal.SIGTERM, "shell"),
        (signal.SIGTERM, "program"),
        (signal.SIGTERM, "group"),
    ],
)
def test_signal_to_any_of_them_makes_one_save_and_a_prompt_end(folder, number, whom):
    job = start(write(folder, ["-c", TRAINER, str(folder)]))
    trainer = int(wait_for(folder / "trainer"))
    if whom == "group":
        os.killpg(job.pid, number)
    else:
        os.kill(job.pid if whom == "shell" else trainer, number)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75
    assert (folder / "saves").read_text() == "saved\n"


def test_warnings_during_the_save_change_nothing(folder):
    job = start(write(folder, ["-c", TRAINER, str(folder)]), SAVE_S="2")
    wait_for(folder / "trainer")
    for _ in range(5):
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, (folder / "saves").read_text()) == (75, "saved\n")


def test_warning_keeps_the_word_that_says_the_run_is_cancelled(folder):
    job = start(write(folder, ["-c", TRAINER, str(folder)], stop_file=folder / "stop"), SAVE_S="1")
    wait_for(folder / "trainer")
    (folder / "stop").write_text("cancel")
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=PATIENCE_S)
    assert (folder / "stop").read_text() == "cancel"


def test_term_that_reached_the_shell_alone_is_repeated_to_a_program_that_goes_on(folder):
    program = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'ready').write_text('1'); time.sleep(500)"
    job = start(write(folder, ["-c", program, str(folder)]))
    wait_for(folder / "ready")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_trainer_that_outlives_its_worker_is_awaited_and_the_code_is_the_workers(folder, number):
    job = start(write(folder, ["-c", WORKER, str(folder), TRAINER]), SAVE_S="3")
    trainer = psutil.Process(int(wait_for(folder / "trainer")))
    trainer.parent().send_signal(number)
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 128 + number
    assert ended(trainer)
    assert (folder / "saves").read_text() == "saved\n"
    assert "awaiting what it left behind" in said


@pytest.mark.parametrize(("job", "told"), [("1", True), ("2", False)])
def test_trainer_of_another_job_of_the_same_run_is_left_alone(folder, job, told):
    mark = {"RQWEN3_STOP_FILE": str(folder / "stop it's"), "SLURM_JOB_ID": job}
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, **mark})
    try:
        script = write(folder, ["-c", "pass"])
        ended = start(script, SLURM_JOB_ID="1", SLURM_JOB_END_TIME=str(int(time.time()) + 600))
        said, _ = ended.communicate(timeout=PATIENCE_S)
        assert ended.returncode == 0
        assert ("awaiting what it left behind" in said) is told
        assert (trainer.poll() is not None) is told
    finally:
        trainer.kill()
        trainer.wait()


def test_program_left_behind_that_does_not_end_is_killed_after_the_budget(folder):
    stubborn = TRAINER.replace("stop.append(1)", "None").replace("time.sleep(float", "time.sleep(500 + float")
    job = start(write(folder, ["-c", WORKER, str(folder), stubborn], save_budget_s=2))
    trainer = psutil.Process(int(wait_for(folder / "trainer")))
    trainer.parent().kill()
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert "still there after 2 s, killed" in said
    deadline = time.monotonic() + PATIENCE_S
    while not ended(trainer):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_environment_file_that_fails_ends_the_job_with_its_name(folder):
    env_file = folder / "env it's.sh"
    env_file.write_text("module load nowhere\nfalse\n")
    job = start(write(folder, ["-c", "print('ran')"], env_file=env_file))
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 78
    assert f"{env_file} failed with exit code 1" in said
    command = next(line for line in said.splitlines() if "to try it on this host: " in line).partition("host: ")[2]
    assert shlex.split(command) == ["bash", str(env_file)]
    assert "ran" not in said


def test_environment_file_in_loose_style_is_no_reason_to_end(folder):
    env_file = folder / "env.sh"
    env_file.write_text(
        'false\nif [ "$NOT_SET_ANYWHERE" = 1 ]; then :; fi\nexport LOADED=yes\nexport PYTHONPATH=/lib\n'
    )
    code = folder / "code"
    code.mkdir()
    said, _ = start(write(folder, ["-c", SHOW], env_file=env_file, code=code)).communicate(timeout=PATIENCE_S)
    environment = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))[0]
    assert environment["LOADED"] == "yes"
    assert environment["PYTHONPATH"] == f"{code}:/lib"


AWKWARD = {
    "SPACES": "organism part two",
    "QUOTE": 'it\'s "quoted"',
    "DOLLAR": "$(touch pwned)",
    "NEWLINE": "a\nb",
    "COMMA": "a,b=c",
    "EMPTY": "",
    "BACKSLASH": "a\\nb",
    "UNICODE": "dépôt",
}


@pytest.mark.parametrize("work_folder", ["my runs", "a'b", "p(1)&x", "dépôt", "$HOME;touch pwned", "-n", "a%b"])
def test_awkward_values_arrive_unchanged_and_nothing_is_run(tmp_path, work_folder):
    folder = tmp_path / work_folder
    folder.mkdir()
    arguments = list(AWKWARD.values())
    job = start(write(folder, ["-c", SHOW, *arguments], environment=AWKWARD, stop_file=folder / "stop"))
    said, _ = job.communicate(timeout=PATIENCE_S)
    environment, argv, cwd = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))
    assert {key: environment[key] for key in AWKWARD} == AWKWARD
    assert (argv, cwd, environment["RQWEN3_STOP_FILE"]) == (arguments, str(folder), str(folder / "stop"))
    assert job.returncode == 0
    assert not list(tmp_path.rglob("pwned"))


def test_deadline_is_the_limit_from_now_where_slurm_does_not_tell(folder):
    begin = time.time()
    said, _ = start(write(folder, ["-c", SHOW])).communicate(timeout=PATIENCE_S)
    environment = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))[0]
    assert begin + 599 <= int(environment["RQWEN3_DEADLINE"]) <= time.time() + 600


BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"
"""Of which no machine needs a table."""


@pytest.mark.parametrize("times", [1, 2])
def test_deadline_is_asked_of_squeue_until_it_tells(folder, times):
    squeue = folder / "squeue"
    ends = 1792888200  # 2:30 in Berlin, for the first time in that night
    answer = f"if [ $(wc -l <{folder}/asked) = {times} ]; then date -d @{ends} +%FT%T; fi"
    squeue.write_text(f'#!/bin/bash\necho "$@" >>{folder}/asked\n{answer}\n')
    squeue.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    said, _ = start(write(folder, ["-c", SHOW]), PATH=path, SLURM_JOB_ID="5", TZ=BERLIN).communicate(timeout=PATIENCE_S)
    environment = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))[0]
    assert environment["RQWEN3_DEADLINE"] == str(ends)
    assert (folder / "asked").read_text() == "-h -j 5 -o %e\n" * times


@pytest.mark.parametrize("name", ["A B", "1A", "A;B", "Ä", ""])
def test_variable_with_an_impossible_name_is_refused(folder, name):
    with pytest.raises(ConfigError, match="no name of an environment variable"):
        write(folder, ["-c", "pass"], environment={name: "1"})
