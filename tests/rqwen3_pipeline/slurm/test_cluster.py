import pytest

from model.errors import ConfigError
from rqwen3_pipeline.slurm.cluster import Cluster, load_cluster, wish

FILE = """
[cluster]
name = "example"
env_file = "env.sh"
[options]
partition = "cpu"
time = "4:00:00"
[options.gpu]
partition = "gpu"
gres = "gpu:l40s:1"
cpus_per_task = 8
[options.transfer]
where = "local"
"""


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "site.toml").write_text(FILE)
    return load_cluster(tmp_path / "site.toml")


def test_cluster_file_gives_options_by_kind(cluster, tmp_path):
    assert (cluster.name, cluster.env_file) == ("example", tmp_path / "env.sh")
    assert cluster.options("cpu") == {"partition": "cpu", "time": "4:00:00"}
    gpu = {"partition": "gpu", "time": "4:00:00", "gres": "gpu:l40s:1", "cpus_per_task": "8"}
    assert cluster.options("gpu") == gpu


def test_wish_takes_site_then_step_then_run(cluster):
    step = {"slurm/kind": "gpu", "slurm/mem": "8G", "slurm/stop": "save", "rqwen3/stage": "x"}
    found = wish([step], {"slurm/mem": "16G", "slurm/job_id": "3", "slurm/attempt": "1"}, cluster)
    assert found.options == {**cluster.options("gpu"), "mem": "16G"}
    assert (found.local, found.saves) == (False, True)


def test_wish_of_a_run_whose_steps_are_all_local_is_local(cluster):
    local = {"slurm/kind": "transfer"}
    assert wish([local, local], {}, cluster).local
    assert wish([{}], {"slurm/where": "local"}, cluster).local
    assert not wish([local], {"slurm/where": "slurm"}, cluster).local


def test_wish_of_a_run_whose_steps_belong_to_two_places_is_refused_unless_a_run_tag_says_where(cluster):
    steps = [{"slurm/kind": "transfer"}, {}]  # on a node without internet the first would fail
    with pytest.raises(ConfigError, match=r"slurm/where: .*Launch them as separate runs"):
        wish(steps, {}, cluster)
    assert wish(steps, {"slurm/where": "local"}, cluster).local
    assert not wish(steps, {"slurm/where": "slurm"}, cluster).local


def test_wish_with_conflicting_steps_is_settled_by_a_run_tag(cluster):
    steps = [{"slurm/kind": "gpu"}, {}]
    with pytest.raises(ConfigError, match="cpu and gpu"):
        wish(steps, {}, cluster)
    assert wish(steps, {"slurm/partition": "gpu"}, cluster).options["partition"] == "gpu"


def test_wish_without_steps_and_site_asks_for_nothing():
    assert wish([], {}, Cluster()).options == {}


@pytest.mark.parametrize(
    ("tag", "value", "words"),
    [
        ("slurm/partitoin", "gpu", "Valid: account"),
        ("slurm/where", "mars", "local, slurm"),
        ("slurm/kind", "tpu", "cpu, gpu, transfer"),
        ("slurm/qos", "a b", "slurm/qos"),
        ("slurm/output", "/x", "no such option"),
        ("slurm/job_name", "x", "no such option"),
    ],
)
def test_wish_with_a_bad_tag_is_refused_by_name(tag, value, words):
    with pytest.raises(ConfigError, match=words):
        wish([{}], {tag: value}, Cluster())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[options]\npartitoin = 'x'", "partitoin"),
        ("[options.tpu]\nmem = '1G'", "tpu"),
        ("[site]\nname = 'x'", "cluster, options, launcher"),
        ("[launcher]\ngrace = 3", "'grace'. Valid: missing_grace_seconds"),
        ("[launcher]\ntimeout_seconds = '30'", "timeout_seconds = '30': must be a whole number"),
        ("[launcher]\nmissing_grace_seconds = 0", "1 or more"),
        ("[launcher]\nsave_budget_seconds = true", "whole number"),
        ("options = 3", "must be a table"),
        ("[options]\nqos = 'a;b'", "slurm/qos"),
        ("not toml", "TOML"),
    ],
)
def test_cluster_file_that_is_wrong_is_refused_with_its_path(tmp_path, text, words):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        load_cluster(tmp_path / "site.toml")
    assert "site.toml" in str(raised.value)


def test_cluster_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="RQWEN3_CLUSTER"):
        load_cluster(tmp_path / "none.toml")


def test_time_of_the_site_is_that_of_a_job_and_times_of_steps_are_summed(cluster):
    assert wish([{}, {}, {}], {}, cluster).options["time"] == "4:00:00"
    assert wish([{"slurm/time": "1:00:00"}, {}], {}, cluster).options["time"] == "0-05:00:00"
