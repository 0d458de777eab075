import errno

import pytest

from rqwen3_pipeline import settings
from rqwen3_pipeline.slurm import doctor
from rqwen3_pipeline.slurm.client import Slurm
from rqwen3_pipeline.slurm.cluster import Cluster
from rqwen3_pipeline.slurm.doctor import Verdict, examine, render
from tests.rqwen3_pipeline.slurm.fake import calls, programs
from tests.rqwen3_pipeline.slurm.test_parsing import record

HEALTHY = {
    "squeue": {"out": record()},
    "sacct": {},
    "sbatch": {"out": "slurm 22.05.8\n", "err": "sbatch: Job 3 to start at 2026-03-01T10:00:00\n"},
}


PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 State=UP TotalCPUs=8
PartitionName=gpu AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 State=UP TotalCPUs=8
PartitionName=old AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 State=DOWN TotalCPUs=8
PartitionName=shut AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 State=INACTIVE
"""
HEALTHY |= {"scontrol": {"out": PARTITIONS}, "sacctmgr": {"out": "\n"}}


def verdicts(found):
    return {finding.what: finding.verdict for finding in found}


def test_local_disk_without_slurm_is_good_in_every_point(tmp_path):
    found = examine(tmp_path, Cluster(), Slurm(), wants_slurm=False, has_postgres=False)
    assert set(verdicts(found).values()) == {Verdict.GOOD}
    assert set(verdicts(found)) == {"run root", "file locks", "SQLite"}
    assert list(tmp_path.iterdir()) == []


def test_site_that_takes_such_jobs_is_good_and_none_is_sent(tmp_path):
    folder = programs(tmp_path / "bin", **HEALTHY)
    cluster = Cluster(common={"partition": "cpu"}, kinds={"gpu": {"gres": "gpu:1"}, "transfer": {"where": "local"}})
    found = verdicts(examine(tmp_path, cluster, Slurm(), wants_slurm=True, has_postgres=False))
    assert {what: verdict for what, verdict in found.items() if verdict is not Verdict.GOOD} == {
        "run root": Verdict.WARNING
    }
    sent = [call["argv"] for call in calls(folder) if call["name"] == "sbatch" and call["argv"] != ["--version"]]
    assert all(arguments[0] == "--test-only" for arguments in sent)
    assert any("--gres=gpu:1" in arguments for arguments in sent)


def test_partition_that_is_not_there_is_bad_with_what_was_asked_for_and_the_file_to_mend(tmp_path):
    refused = {"err": "sbatch: error: invalid partition specified: gpux\n", "rc": 1}
    programs(tmp_path / "bin", **{**HEALTHY, "sbatch": refused})
    cluster = Cluster(kinds={"gpu": {"partition": "gpux"}})
    found = examine(tmp_path, cluster, Slurm(), wants_slurm=True, has_postgres=False)
    (gpu,) = [finding for finding in found if finding.what == "jobs of kind gpu"]
    assert gpu.verdict is Verdict.BAD
    for words in ("invalid partition specified: gpux", "partition=gpux", "[options.gpu]", "RQWEN3_CLUSTER"):
        assert words in gpu.said


def test_slurm_that_does_not_answer_is_bad_and_the_files_are_looked_at_all_the_same(tmp_path):
    away = {"err": "squeue: error: Unable to contact slurm controller (connect failure)\n", "rc": 1}
    programs(tmp_path / "bin", **{**HEALTHY, "squeue": away})
    found = verdicts(examine(tmp_path, Cluster(), Slurm(), wants_slurm=True, has_postgres=False))
    assert found["SLURM"] is Verdict.BAD
    assert found["file locks"] is Verdict.GOOD


def test_slurm_that_is_too_old_is_bad_and_one_without_accounting_a_warning(tmp_path):
    no_accounting = {"err": "Slurm accounting storage is disabled\n", "rc": 1}
    old = {"out": "slurm 19.05.5\n"}
    programs(tmp_path / "bin", **{**HEALTHY, "sbatch": old, "sacct": no_accounting})
    found = examine(tmp_path, Cluster(), Slurm(), wants_slurm=True, has_postgres=False)
    assert verdicts(found)["SLURM"] is Verdict.BAD
    assert verdicts(found)["accounting"] is Verdict.WARNING
    assert "older than 20.11" in render(found)


@pytest.mark.parametrize("kind", ["nfs4", "wekafs", "fuse.glusterfs"])
@pytest.mark.parametrize(("has_postgres", "verdict"), [(False, Verdict.BAD), (True, None)])
def test_network_file_system_under_sqlite_is_bad_with_the_way_out(tmp_path, monkeypatch, kind, has_postgres, verdict):
    monkeypatch.setattr(doctor, "file_system_kind", lambda path: kind)
    found = examine(tmp_path, Cluster(), Slurm(), wants_slurm=False, has_postgres=has_postgres)
    assert verdicts(found).get("event store") is verdict
    assert ("RQWEN3_POSTGRES_URL" in render(found)) is not has_postgres


def test_postgres_without_its_package_is_bad_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    found = examine(tmp_path, Cluster(), Slurm(), wants_slurm=False, has_postgres=True)
    assert verdicts(found)["event store"] is Verdict.BAD
    assert "make install-cluster" in render(found)


@pytest.mark.parametrize("take", ["lockf", "flock"])
def test_locks_that_do_not_hold_are_found(tmp_path, monkeypatch, take):
    monkeypatch.setattr(doctor.fcntl, take, named(take, lambda *_: None))
    assert doctor._locks(tmp_path).verdict is Verdict.BAD


@pytest.mark.parametrize("take", ["lockf", "flock"])
def test_file_system_without_locks_is_bad_with_its_kind_and_the_way_out(tmp_path, monkeypatch, take):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(doctor.fcntl, take, named(take, refuse))
    monkeypatch.setattr(doctor, "file_system_kind", lambda path: "lustre")
    finding = doctor._locks(tmp_path)
    assert finding.verdict is Verdict.BAD
    for words in (f"no {take} on lustre", "Function not implemented", "RQWEN3_HOME", "mount option flock"):
        assert words in finding.said


def named(name, function):
    function.__name__ = name
    return function


def test_database_that_loses_rows_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_WRITE", doctor._WRITE.replace("range(int", "range(1, int"))
    finding = doctor._sqlite(tmp_path)
    assert finding.verdict is Verdict.BAD
    assert "398 of 400 rows" in finding.said


def of_gpu(tmp_path, cluster, **answers):
    """What is found of jobs with a GPU."""
    programs(tmp_path / "bin", **{**HEALTHY, **answers})
    found = examine(tmp_path, cluster, Slurm(), wants_slurm=True, has_postgres=False)
    return next(finding for finding in found if finding.what.startswith("jobs of kind") and "gpu" in finding.what)


@pytest.mark.parametrize(
    ("common", "gpu", "words"),
    [
        ({}, {"partition": "gpu", "time": "99999-00:00:00"}, "time=99999-00:00:00 is above MaxTime 1-00:00:00 of"),
        ({"time": "2-00:00:00"}, {"partition": "gpu"}, "Mend it in [options] of the file that RQWEN3_CLUSTER names"),
        ({"time": "25:00:00"}, {"partition": "old,gpu", "qos": "long"}, "partition old is DOWN"),
        ({}, {"partition": "shut"}, "partition shut is INACTIVE: no job starts there"),
    ],
)
def test_job_that_no_partition_would_ever_start_is_bad_though_sbatch_would_take_it(tmp_path, common, gpu, words):
    finding = of_gpu(tmp_path, Cluster(common=common, kinds={"gpu": gpu}))
    assert finding.verdict is Verdict.BAD
    assert words in finding.said


@pytest.mark.parametrize(
    ("gpu", "flags"),
    [
        ({"partition": "gpu", "time": "1-00:00:00"}, ""),
        ({"partition": "old,gpu", "time": "1-00:00:00"}, ""),
        ({"partition": "old,cpu", "time": "9-00:00:00"}, ""),
        ({"partition": "gpu", "time": "9-00:00:00", "qos": "long"}, "DenyOnLimit,PartitionTimeLimit"),
        ({"partition": "old", "where": "local"}, ""),
        ({}, ""),
    ],
)
def test_job_that_some_partition_may_start_is_good(tmp_path, gpu, flags):
    assert of_gpu(tmp_path, Cluster(kinds={"gpu": gpu}), sacctmgr={"out": f"{flags}\n"}).verdict is Verdict.GOOD


def test_partitions_that_are_not_told_are_a_warning(tmp_path):
    programs(tmp_path / "bin", **{**HEALTHY, "scontrol": {"err": "scontrol: error: Access denied\n", "rc": 1}})
    found = verdicts(examine(tmp_path, Cluster(), Slurm(), wants_slurm=True, has_postgres=False))
    assert found["partitions"] is Verdict.WARNING
    assert found["jobs of kind cpu, gpu, transfer"] is Verdict.GOOD


def test_refused_job_is_told_with_the_table_that_says_each_option_once_for_kinds_that_ask_for_the_same(tmp_path):
    refused = {"err": "sbatch: error: Invalid account\n", "rc": 1}
    programs(tmp_path / "bin", **{**HEALTHY, "sbatch": refused})
    cluster = Cluster(common={"account": "x"}, kinds={"gpu": {"gres": "gpu:1"}}, path=tmp_path / "site.toml")
    found = examine(tmp_path, cluster, Slurm(), wants_slurm=True, has_postgres=False)
    cpu, gpu = (finding for finding in found if finding.what.startswith("jobs of kind"))
    assert (cpu.what, gpu.what) == ("jobs of kind cpu, transfer", "jobs of kind gpu")
    assert cpu.said.endswith(f"Asked for: account=x in [options]. Mend it in {tmp_path}/site.toml (RQWEN3_CLUSTER).")
    assert "Asked for: account=x in [options]; gres=gpu:1 in [options.gpu]. Mend it" in gpu.said


def test_env_file_that_is_not_there_and_a_gpu_that_no_plan_knows_are_bad(tmp_path):
    programs(tmp_path / "bin", **HEALTHY)
    wrong, right = Cluster(env_file=tmp_path / "no.sh", gpu="b200"), Cluster(env_file=tmp_path / "env.sh", gpu="l40s")
    (tmp_path / "env.sh").touch()
    found = examine(tmp_path, wrong, Slurm(), wants_slurm=True, has_postgres=False)
    assert (verdicts(found)["env_file"], verdicts(found)["gpu"]) == (Verdict.BAD, Verdict.BAD)
    for words in (f"{tmp_path}/no.sh: no such file", "exit code 78", "b200: not known. Valid: l40s", "Mend gpu in"):
        assert words in render(found)
    found = verdicts(examine(tmp_path, right, Slurm(), wants_slurm=True, has_postgres=False))
    assert (found["env_file"], found["gpu"]) == (Verdict.GOOD, Verdict.GOOD)


def test_jobs_that_have_ended_are_not_counted(tmp_path):
    listed = {"out": record() + record(job_id="8", state="COMPLETED") + record(job_id="9", state="FAILED")}
    programs(tmp_path / "bin", **{**HEALTHY, "squeue": listed})
    found = examine(tmp_path, Cluster(), Slurm(), wants_slurm=True, has_postgres=False)
    assert "your jobs that wait or run there: 1" in render(found)


def test_full_run_root_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOM_BYTES", 2**60)
    found = examine(tmp_path, Cluster(), Slurm(), wants_slurm=False, has_postgres=False)
    assert verdicts(found)["free space"] is Verdict.BAD
    assert "Free some space" in render(found)
    assert "RQWEN3_POSTGRES_URL" not in render(found)


def test_quota_that_stops_sqlite_is_told_as_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_WRITE", "raise SystemExit('sqlite3.OperationalError: database or disk is full')")
    finding = doctor._sqlite(tmp_path)
    assert finding.verdict is Verdict.BAD
    assert "Free some space" in finding.said
    assert "POSTGRES" not in finding.said
