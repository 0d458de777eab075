from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rqwen3_pipeline.slurm import parsing
from rqwen3_pipeline.slurm.parsing import FIELD, RECORD, SlurmError
from rqwen3_pipeline.slurm.states import State

SCONTROL = (
    "JobId=7 JobName=dg-1234abcd-1 UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=4294901757 Nice=0 "
    "Account=(null) QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=0 Restarts=0 "
    "BatchFlag=1 Reboot=0 ExitCode=3:0 RunTime=00:00:03 TimeLimit=1-00:10:00 TimeMin=N/A "
    "SubmitTime=2026-03-01T10:00:00 EligibleTime=2026-03-01T10:00:00 StartTime=2026-03-01T10:00:01 "
    "EndTime=2026-03-01T10:00:04 Deadline=N/A Partition=cpu AllocNode:Sid=login:1 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=node1 BatchHost=node1 NumNodes=1 Command=(null) WorkDir=/home/ann "
    "Comment=dagster:1234abcd-0000 StdErr=/home/ann/a.log StdIn=/dev/null StdOut=/home/ann/a.log Power=\n"
)
"""As SLURM 22.05.8 printed it, names changed."""


def record(job_id="7", state="RUNNING", name="a name", comment="dagster:x"):
    fields = (job_id, state, "None", "node1", "2026-03-01T10:00:00", "2026-03-01T10:00:01", "N/A", "10:00", "cpu")
    return FIELD.join((*fields, comment, name)) + RECORD


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("501\n", 501),
        ("501;nautilus\n", 501),
        ("Submitted batch job 501 on cluster nautilus\n", 501),
        ("NOTICE: maintenance on 2026-12-24\n501\n", 501),
        ("501\nYour project has 7 hours left\n", 501),
        ("Welcome, user 77!\nSubmitted batch job 501\n", 501),
        ("", None),
        ("maintenance on 2026-12-24\n", None),
    ],
)
def test_job_id_among_what_a_site_prints_is_found(printed, job_id):
    assert parsing.submitted_id(printed) == job_id


def test_squeue_records_with_awkward_names_are_read_field_by_field():
    text = record() + "\n" + record("8", "PENDING", "two\nlines | and ü") + "\n"
    jobs = parsing.squeue_jobs(text)
    assert set(jobs) == {7, 8}
    assert (jobs[8].name, jobs[8].state) == ("two\nlines | and ü", State.PENDING)
    assert (jobs[7].reason, jobs[7].time_limit_s, jobs[7].comment, jobs[7].ended) == ("", 600.0, "dagster:x", None)
    assert jobs[7].submitted == datetime(2026, 3, 1, 10, tzinfo=UTC).timestamp()


@given(st.lists(st.tuples(st.integers(1, 10**9), st.text(alphabet=st.characters(exclude_characters=FIELD + RECORD)))))
def test_squeue_of_any_job_names_loses_none(rows):
    text = "".join(record(str(job_id), name=name) + "\n" for job_id, name in rows)
    assert {job_id: job.name for job_id, job in parsing.squeue_jobs(text).items()} == dict(rows)


@pytest.mark.parametrize("text", ["Hello\n", "7 RUNNING\n", record()[:-9], record("seven"), record(state=" "), "\x1e"])
def test_squeue_garbage_is_an_error_that_shows_it(text):
    with pytest.raises(SlurmError, match="squeue printed something"):
        parsing.squeue_jobs(text)


def test_squeue_of_no_jobs_is_empty():
    assert parsing.squeue_jobs("") == parsing.squeue_jobs("\n") == {}


def test_scontrol_of_a_failed_job_gives_its_exit_code_and_times():
    job = parsing.scontrol_job(SCONTROL, 7)
    assert job is not None
    assert (job.state, job.exit_code, job.reason) == (State.FAILED, "3:0", "NonZeroExitCode")
    assert (job.time_limit_s, job.comment, job.node) == (87000.0, "dagster:1234abcd-0000", "node1")
    assert job.ended is not None
    assert job.started is not None
    assert job.ended - job.started == 3.0
    assert "exit code 3:0" in job.describe()


@pytest.mark.parametrize("text", ["JobId=7\n", "what?\n"])
def test_scontrol_garbage_is_an_error(text):
    with pytest.raises(SlurmError, match="scontrol show job 7"):
        parsing.scontrol_job(text, 7)


def test_sacct_rows_of_a_requeued_job_end_with_the_last_and_steps_are_left_out():
    row = "{}|{}|0:15|node1|2026-03-01T10:00:00|2026-03-01T10:00:01|2026-03-01T10:00:04|10|cpu|a|b\n"
    text = row.format(7, "NODE_FAIL") + row.format("7.batch", "CANCELLED") + row.format(7, "CANCELLED by 1000")
    jobs = parsing.sacct_jobs(text)
    assert set(jobs) == {7}
    assert (jobs[7].state_text, jobs[7].exit_code, jobs[7].name) == ("CANCELLED by 1000", "0:15", "a|b")
    assert jobs[7].time_limit_s == 600.0


def test_sacct_garbage_is_an_error():
    with pytest.raises(SlurmError, match="sacct printed"):
        parsing.sacct_jobs("7 RUNNING\n")


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_duration_in_each_notation_is_its_seconds(days, hours, minutes, seconds):
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parsing.duration_s(f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}") == total
    assert parsing.duration_s(f"{hours}:{minutes:02d}:{seconds:02d}") == total - days * 86400
    assert parsing.duration_s(f"{minutes:02d}:{seconds:02d}") == minutes * 60 + seconds
    assert parsing.duration_s(str(minutes)) == minutes * 60
    assert parsing.duration_s(f"{days}-{hours}") == (days * 24 + hours) * 3600


@pytest.mark.parametrize("text", ["UNLIMITED", "INVALID", "", "NOT_SET", "1:2:3:4"])
def test_duration_that_is_none_is_none(text):
    assert parsing.duration_s(text) is None
