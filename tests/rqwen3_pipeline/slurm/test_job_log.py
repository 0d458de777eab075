"""Memory kills as slurmstepd of several versions tells of them, and what only looks like one."""

import pytest

from rqwen3_pipeline.slurm.job_log import TAIL_BYTES, memory_kill

BY_ACCOUNTING = "StepId=7.batch exceeded memory limit (2983526400 > 2621440000), being killed"
BY_CGROUP = (
    "Detected 1 oom-kill event(s) in StepId=7.batch. Some of your processes may have been killed by the cgroup "
    "out-of-memory handler."
)
BY_CGROUP_V2 = "Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize("line", [BY_ACCOUNTING, BY_CGROUP, BY_CGROUP_V2, "Exceeded job memory limit"])
def test_memory_kill_in_a_jobs_output_is_its_line(tmp_path, line):
    log = tmp_path / "attempt-1.log"
    log.write_text(f"step 3\nslurmstepd: error: {line}\nslurmstepd: error: *** JOB 7 ON node1 CANCELLED ***\n")
    assert memory_kill(log) == line


def test_memory_kill_told_twice_is_the_line_with_the_figures(tmp_path):
    """As SLURM 22.05 wrote it, where several slurmd share a host."""
    log = tmp_path / "attempt-1.log"
    lines = (BY_ACCOUNTING, "Exceeded job memory limit", "*** JOB 7 ON node1 CANCELLED AT 2026-01-01T00:00:00 ***")
    log.write_text("".join(f"slurmstepd-node1: error: {line}\n" for line in lines))
    assert memory_kill(log) == BY_ACCOUNTING


@pytest.mark.parametrize(
    "text",
    [
        "",
        "RuntimeError: CUDA out of memory\n",
        "the document says: slurmstepd: error: Exceeded job memory limit\n",
        "slurmstepd: error: StepId=7.batch hit memory limit at least once during execution. This may or may not\n",
        f"slurmstepd: error: {BY_ACCOUNTING}\n" + "x" * TAIL_BYTES,
    ],
)
def test_memory_kill_of_an_output_that_ends_otherwise_is_empty(tmp_path, text):
    log = tmp_path / "attempt-1.log"
    log.write_text(text)
    assert memory_kill(log) == ""


def test_memory_kill_of_an_output_that_is_not_there_is_empty(tmp_path):
    assert memory_kill(tmp_path / "attempt-1.log") == ""
