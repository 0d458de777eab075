import json
import os
from pathlib import Path

import pytest

from rqwen3_pipeline.slurm import parsing
from rqwen3_pipeline.slurm.client import Slurm, SlurmError, SlurmMissing, SlurmRejected, SlurmUnavailable, SlurmUnclear
from rqwen3_pipeline.slurm.options import JobOptions
from rqwen3_pipeline.slurm.states import Phase, State
from tests.rqwen3_pipeline.slurm.fake import calls, programs
from tests.rqwen3_pipeline.slurm.test_parsing import SCONTROL, record

SHARED = Path(__file__).parents[4] / "shared"
AWAY = {"err": "squeue: error: slurm_load_jobs: Unable to contact slurm controller (connect failure)\n", "rc": 1}
UNKNOWN_JOB = {"err": "slurm_load_jobs error: Invalid job id specified\n", "rc": 1}
NO_ACCOUNTING = {"err": "Slurm accounting storage is disabled\n", "rc": 1}


@pytest.fixture
def bin_folder(tmp_path):
    return tmp_path / "bin"


def test_submit_sends_script_and_options_and_nothing_of_this_jobs_environment(bin_folder):
    programs(bin_folder, sbatch={"out": "501\n"})
    os.environ |= {
        "SLURM_JOB_ID": "3",
        "SBATCH_QOS": "mine",
        "SLURM_CONF": "/etc/c",
        "SQUEUE_FORMAT": "%i",
        "KEPT": "1",
    }
    assert Slurm().submit(JobOptions(job_name="a b", output="/a b/c%d.log", gres="gpu:1"), "#!/bin/bash\n'x'\n") == 501
    (call,) = calls(bin_folder)
    assert call["stdin"] == "#!/bin/bash\n'x'\n"
    assert {"--parsable", "--no-requeue", "--output=/a b/c%%d.log", "--gres=gpu:1", "--job-name=a_b"} <= set(
        call["argv"]
    )
    assert "--signal=B:USR1@300" in call["argv"]
    leaked = [key for key in call["env"] if key.startswith(("SLURM_", "SBATCH_", "SQUEUE_"))]
    assert (leaked, call["env"]["KEPT"]) == (["SLURM_CONF"], "1")


def test_times_are_asked_for_in_utc_where_no_hour_comes_twice_and_jobs_keep_their_zone(bin_folder, monkeypatch):
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    programs(bin_folder, sbatch={"out": "501\n"}, squeue={"out": ""})
    Slurm().submit(JobOptions(job_name="a"), "")
    Slurm().jobs()
    assert [call["env"]["TZ"] for call in calls(bin_folder)] == ["CET-1CEST,M3.5.0,M10.5.0/3", "UTC"]


def test_submit_refused_tells_sbatchs_own_words(bin_folder):
    programs(bin_folder, sbatch={"err": "sbatch: error: invalid partition specified: nowhere\n", "rc": 1})
    with pytest.raises(SlurmRejected, match="invalid partition specified: nowhere"):
        Slurm().submit(JobOptions(job_name="a"), "")


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates a policy",
        "sbatch: error: Munge encode failed: Failed to access socket",
    ],
)
def test_submit_while_slurm_takes_nothing_is_unavailable(bin_folder, said):
    programs(bin_folder, sbatch={"err": said, "rc": 1})
    with pytest.raises(SlurmUnavailable):
        Slurm().submit(JobOptions(job_name="a"), "")


def test_submit_that_hangs_is_given_up_as_unavailable(bin_folder):
    programs(bin_folder, sbatch={"sleep": 60})
    with pytest.raises(SlurmUnavailable, match="no answer within 1 s"):
        Slurm(timeout_s=0.5).submit(JobOptions(job_name="a"), "")


def test_submit_that_names_no_job_is_unclear(bin_folder):
    programs(bin_folder, sbatch={"out": ""})
    with pytest.raises(SlurmUnclear, match="named no job"):
        Slurm().submit(JobOptions(job_name="a"), "")


@pytest.mark.parametrize(
    ("program", "ask"), [("squeue", Slurm.jobs), ("sbatch", lambda slurm: slurm.submit(JobOptions(job_name="a"), ""))]
)
def test_programs_not_on_path_are_missing_and_no_outage_with_the_way_out(tmp_path, program, ask):
    os.environ["PATH"] = str(tmp_path)
    with pytest.raises(SlurmMissing, match=f"{program}: not found on PATH.*rqwen3 doctor") as raised:
        ask(Slurm())
    assert not isinstance(raised.value, SlurmUnavailable)


@pytest.mark.parametrize("answer", [AWAY, {**AWAY, "rc": 0}])
def test_jobs_while_slurm_is_away_is_an_error_and_never_empty(bin_folder, answer):
    programs(bin_folder, squeue=answer)
    with pytest.raises(SlurmUnavailable):
        Slurm().jobs()


def test_jobs_of_garbage_is_an_error_that_is_not_unavailability(bin_folder):
    programs(bin_folder, squeue={"out": "<html>maintenance</html>\n"})
    with pytest.raises(SlurmError, match="maintenance") as raised:
        Slurm().jobs()
    assert not isinstance(raised.value, SlurmUnavailable)


def test_jobs_asked_for_200_times_cost_one_command(bin_folder):
    programs(bin_folder, squeue={"out": "".join(record(str(i)) + "\n" for i in range(1, 201))})
    slurm = Slurm(cache_s=600)
    assert [slurm.job(i) is not None for i in range(1, 201)] == [True] * 200
    assert [call["argv"][:4] for call in calls(bin_folder)] == [["--me", "-t", "all", "-h"]]


def test_job_that_has_ended_is_asked_of_the_controller_for_its_exit_code(bin_folder):
    programs(bin_folder, squeue={"out": record(state="FAILED")}, scontrol={"out": SCONTROL})
    job = Slurm().job(7)
    assert job is not None
    assert job.exit_code == "3:0"


def test_job_that_the_controller_forgot_is_found_in_the_accounting(bin_folder):
    row = "7|TIMEOUT|0:0|n|2026-03-01T10:00:00|2026-03-01T10:00:01|2026-03-01T10:00:04|10|cpu|a\n"
    programs(bin_folder, squeue={}, scontrol=UNKNOWN_JOB, sacct={"out": row})
    job = Slurm().job(7)
    assert job is not None
    assert job.state is State.TIMEOUT
    assert "-j" in calls(bin_folder)[-1]["argv"]


def test_job_that_nobody_knows_is_none_and_disabled_accounting_is_asked_once(bin_folder):
    programs(bin_folder, squeue={}, scontrol=UNKNOWN_JOB, sacct=NO_ACCOUNTING)
    slurm = Slurm()
    assert slurm.job(7) is slurm.job(8) is None
    assert [call["name"] for call in calls(bin_folder)].count("sacct") == 1


def test_find_sees_what_came_since_the_last_answer(bin_folder):
    programs(bin_folder, squeue={"out": record("7", name="dg-1-1") + "\n" + record("9", name="dg-1-1")})
    slurm = Slurm(cache_s=600)
    slurm.jobs()
    assert [job.job_id for job in slurm.find("dg-1-1")] == [9, 7]
    assert len(calls(bin_folder)) == 2


def test_accounting_asked_by_names_tells_those_jobs_alone_in_one_command(bin_folder):
    lines = [
        f"{job_id}|PENDING|0:0|None|2026-03-01T10:00:00|Unknown|Unknown|10|cpu|{name}\n"
        for job_id, name in ((7, "dg-1-1"), (8, "dg-2-1"), (9, "dg-11-1"))
    ]
    programs(bin_folder, sacct={"out": "".join(lines)})
    assert sorted(Slurm().accounted_by_name(["dg-1-1", "dg-2-1"])) == [7, 8]
    assert Slurm().accounted_by_name([]) == {}
    (call,) = calls(bin_folder)
    assert "dg-1-1,dg-2-1" in call["argv"]


def test_cancel_of_jobs_that_are_over_is_no_error(bin_folder):
    said = "scancel: error: Kill job error on job id 7: Invalid job id specified\n"
    programs(bin_folder, scancel={"err": said, "rc": 1})
    Slurm().cancel(7, 8, signal="USR1", batch=True)
    assert calls(bin_folder)[0]["argv"] == ["-s", "USR1", "--batch", "7", "8"]


def test_cancel_that_is_refused_says_why(bin_folder):
    programs(
        bin_folder, scancel={"err": "scancel: error: Kill job error on job id 7: Access/permission denied\n", "rc": 1}
    )
    with pytest.raises(SlurmRejected, match="permission denied"):
        Slurm().cancel(7)


@pytest.fixture
def fakeslurm(tmp_path, monkeypatch):
    """The programs of the shared tools, and how to give them a scenario."""
    source = SHARED / "tools" / "fakeslurm" / "_fake.py"
    if not source.exists():
        pytest.skip("../shared/tools/fakeslurm is not there")
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_bytes(source.read_bytes())
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    count = iter(range(1000))

    def give(scenario):
        folder = tmp_path / f"scenario{next(count)}"
        folder.mkdir()
        (folder / "scenario.json").write_text(json.dumps(scenario))
        monkeypatch.setenv("FAKESLURM_SCENARIO", str(folder / "scenario.json"))
        monkeypatch.setenv("FAKESLURM_STATE", str(folder / "state"))

    return give


def test_case_s04_ids_in_every_dress_are_501(fakeslurm):
    scenarios = json.loads((SHARED / "cases/S04/scenarios.json").read_text())
    for name, scenario in scenarios.items():
        fakeslurm(scenario)
        if name == "nothing_printed":
            with pytest.raises(SlurmUnclear):
                Slurm().submit(JobOptions(job_name="a"), "")
        else:
            assert Slurm().submit(JobOptions(job_name="a"), "") == 501


def test_case_s05_job_that_shows_up_late_is_unknown_then_pending_then_running(fakeslurm):
    fakeslurm(json.loads((SHARED / "cases/S05/scenario.json").read_text()))
    slurm = Slurm(cache_s=0)
    found = [slurm.job(501) for _ in range(4)]
    assert [job and job.state for job in found] == [None, None, State.PENDING, State.RUNNING]


def test_case_s07_every_state_is_told_and_a_new_one_is_no_end(fakeslurm):
    texts = json.loads((SHARED / "cases/S07/states.json").read_text())["states"]
    rows = [{"JOBID": str(500 + i), "STATE": text, "NAME": "a", "EXITCODE": "0:0"} for i, text in enumerate(texts)]
    fakeslurm({"sacct": [{"rows": rows}]})
    found = Slurm().accounted(range(500, 500 + len(texts)))
    for i, text in enumerate(texts):
        assert found[500 + i].state is (State.UNKNOWN if text == "SOMETHING_NEW" else State[text.split()[0]])
        assert (found[500 + i].phase is Phase.SUCCEEDED) == (text == "COMPLETED")


def test_formats_ask_for_as_many_fields_as_are_read():
    assert parsing.SQUEUE_FORMAT.count(parsing.FIELD) == record().count(parsing.FIELD)


def test_queue_lists_who_waits_in_which_order_and_asks_for_those_partitions(bin_folder):
    programs(bin_folder, squeue={"out": "9 gpu\n7 gpu\n8 long\nslurm says hello\n"})
    assert Slurm().queue(["gpu", "long"]) == {"gpu": [9, 7], "long": [8]}
    (call,) = calls(bin_folder)
    assert call["argv"][:4] == ["-p", "gpu,long", "-t", "PENDING"]
    programs(bin_folder, squeue=AWAY)
    with pytest.raises(SlurmUnavailable):
        Slurm().queue(["gpu"])
