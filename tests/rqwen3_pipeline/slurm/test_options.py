import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import ConfigError
from rqwen3_pipeline.slurm.options import RULES, JobOptions, check_option, combine, legal_name

GOOD = {
    "partition": ["gpu", "gpu,gpu-long"],
    "time": ["10", "24:00:00", "1-00:00:00"],
    "cpus_per_task": ["8"],
    "mem": ["32G", "0"],
    "gres": ["gpu:1", "gpu:nvidia_l40s:1", "gpu:1,shard:2", "gpu"],
    "qos": ["gpu-long"],
    "account": ["my.lab"],
    "reservation": ["course"],
    "constraint": ["l40s|a100", "[rack1&rack2]", "avx512"],
    "nodes": ["1", "1-2"],
    "nodelist": ["node[1-3],x"],
    "exclude": ["node1"],
    "signal": ["B:USR1@300", "B:TERM@60"],
    "dependency": ["singleton", "afterany:12:13"],
}
EVIL = ["", " ", "x y", "a\nb", "a\n#SBATCH --qos=x", "$(touch pwned)", "`id`", "a;b", "'", '"', "-x", "--uid=0", "ü"]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GOOD.items() for value in values])
def test_option_that_is_valid_becomes_one_argument(key, value):
    assert f"--{key.replace('_', '-')}={value}" in JobOptions(job_name="a", **{key: value}).arguments()


def test_every_option_has_an_example_here():
    assert set(GOOD) == set(RULES)


@pytest.mark.parametrize("key", sorted(RULES))
@pytest.mark.parametrize("value", EVIL)
def test_option_with_shell_syntax_space_or_newline_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"slurm/{key}"):
        JobOptions(job_name="a", **{key: value})


def test_option_misspelt_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"slurm/partitoin: there is no such option. Valid: .*partition"):
        check_option("partitoin", "gpu")


@pytest.mark.parametrize("value", ["USR1@300", "TERM@30", "B:KILL@30", "B:USR1", "R:USR1@30"])
def test_signal_that_would_not_reach_the_shell_is_refused(value):
    with pytest.raises(ConfigError, match="slurm/signal"):
        JobOptions(job_name="a", signal=value)


@pytest.mark.parametrize("key", ["comment", "output", "chdir"])
def test_text_of_more_than_a_line_is_refused_and_other_text_kept(key):
    with pytest.raises(ConfigError, match=f"slurm/{key}"):
        JobOptions(job_name="a", **{key: "a\nb"})
    text = "/dépôt/it's $HOME;touch pwned"
    assert f"--{key}={text}" in JobOptions(job_name="a", **{key: text}).arguments()


def test_output_path_with_slurms_marks_is_taken_literally():
    assert "--output=/a/100%%j.log" in JobOptions(job_name="a", output="/a/100%j.log").arguments()
    with pytest.raises(ConfigError, match="backslash"):
        JobOptions(job_name="a", output="/a\\b.log")


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=500))
def test_any_name_becomes_a_legal_one(text):
    name = legal_name(text)
    assert 1 <= len(name) <= 64
    assert name.isascii()
    assert not name.startswith("-")
    assert legal_name(name) == name
    assert JobOptions(job_name=text).job_name == name


def test_job_is_never_requeued_and_its_log_appended():
    assert {"--no-requeue", "--open-mode=append", "--parsable"} <= set(JobOptions(job_name="a").arguments())


def test_steps_combined_take_the_most_and_sum_the_times():
    one = {"cpus_per_task": "2", "mem": "900M", "gres": "gpu:1,shard:2", "time": "30", "partition": "gpu"}
    two = {"cpus_per_task": "8", "mem": "1G", "gres": "gpu:2", "time": "23:45:30", "partition": "gpu"}
    assert combine([one, two]) == {
        "cpus_per_task": "8",
        "mem": "1G",
        "gres": "gpu:2,shard:2",
        "time": "1-00:15:30",
        "partition": "gpu",
    }


def test_steps_of_different_partitions_can_not_be_one_job():
    with pytest.raises(ConfigError, match="cpu and gpu"):
        combine([{"partition": "gpu"}, {"partition": "cpu"}])


def test_steps_of_which_one_states_no_time_have_no_sum():
    with pytest.raises(ConfigError, match="1 of the run's 2 steps"):
        combine([{"time": "10"}, {"mem": "1G"}])


def test_memory_of_a_whole_node_is_the_most():
    assert combine([{"mem": "0"}, {"mem": "500G"}])["mem"] == "0"


@pytest.mark.parametrize(
    ("time", "seconds"), [("10", 600), ("0:20", 60), ("1:01", 120), ("1-00:00:00", 86400), (None, None)]
)
def test_time_limit_is_rounded_up_to_minutes(time, seconds):
    assert JobOptions(job_name="a", time=time).time_limit_s == seconds
