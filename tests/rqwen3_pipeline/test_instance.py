"""dagster.yaml as the settings render it."""

import os

import dagster as dg
import pytest
import yaml

from model.errors import ConfigError, EnvironmentProblem
from rqwen3_pipeline import instance, settings
from rqwen3_pipeline.instance import render_home
from rqwen3_pipeline.launcher import SlurmRunLauncher
from rqwen3_pipeline.settings import RunRoot, Settings
from rqwen3_pipeline.slurm.reconcile import Patience


def rendered(folder, **environment):
    os.environ |= {f"RQWEN3_{key}": value for key, value in environment.items()}
    return yaml.safe_load((render_home(RunRoot(folder)) / "dagster.yaml").read_text())


def test_home_by_default_is_local_and_sqlite(tmp_path):
    config = rendered(tmp_path)
    assert "run_launcher" not in config
    assert config["storage"]["sqlite"]["base_dir"] == f"{tmp_path}/dagster/storage"
    assert config["run_coordinator"]["config"]["max_concurrent_runs"] == instance.LOCAL_RUNS


@pytest.mark.parametrize("name", ['a "quoted" one', "a\\b", "it's: #1", "{{ x }}", "ü 😀", "$HOME %s"])
def test_home_of_any_name_is_where_the_instance_lies(tmp_path, name):
    config = rendered(tmp_path / name, LAUNCHER="slurm")
    assert config["run_launcher"]["config"]["home"] == str(tmp_path / name)
    with dg.DagsterInstance.from_config(str(tmp_path / name / "dagster")) as opened:
        opened.get_runs_count()
        assert opened.root_directory == f"{tmp_path / name}/dagster"
    assert (tmp_path / name / "dagster" / "storage").is_dir()


def test_home_for_slurm_names_the_launcher_and_outwaits_queue_and_save(tmp_path):
    folder = tmp_path / "a 'quoted' home"
    (tmp_path / "site.toml").write_text("")
    config = rendered(folder, LAUNCHER="slurm", CLUSTER=f"{tmp_path}/site.toml", MAX_JOBS="6")
    launcher = config["run_launcher"]
    assert (launcher["module"], launcher["class"]) == ("rqwen3_pipeline.launcher", "SlurmRunLauncher")
    assert launcher["config"]["home"] == str(folder)
    assert launcher["config"]["cluster"].endswith("/site.toml")
    queue, monitoring = config["run_coordinator"]["config"], config["run_monitoring"]
    assert (queue["max_concurrent_runs"], queue["max_user_code_failure_retries"]) == (6, 100)
    assert monitoring["start_timeout_seconds"] == 14 * 86400
    assert monitoring["cancel_timeout_seconds"] > SlurmRunLauncher(home="x").patience.save_s
    assert monitoring["max_resume_run_attempts"] == 0


def test_home_for_slurm_is_one_that_dagster_takes(tmp_path):
    rendered(tmp_path, LAUNCHER="slurm")
    opened = dg.DagsterInstance.from_config(str(tmp_path / "dagster"))
    assert isinstance(opened.run_launcher, SlurmRunLauncher)
    assert opened.run_launcher.home == tmp_path
    opened.dispose()


def test_home_for_slurm_waits_as_long_as_the_sites_file_says(tmp_path):
    (tmp_path / "site.toml").write_text("[launcher]\nmissing_grace_seconds = 900\nsave_budget_seconds = 3000\n")
    config = rendered(tmp_path / "home", LAUNCHER="slurm", CLUSTER=f"{tmp_path}/site.toml")
    assert config["run_monitoring"]["cancel_timeout_seconds"] == 3600
    opened = dg.DagsterInstance.from_config(str(tmp_path / "home" / "dagster"))
    launcher = opened.run_launcher
    assert (launcher.patience, launcher.slurm.timeout_s) == (Patience(missing_s=900, save_s=3000), 30)
    opened.dispose()


def test_home_for_slurm_with_a_cluster_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="RQWEN3_CLUSTER"):
        rendered(tmp_path, LAUNCHER="slurm", CLUSTER=f"{tmp_path}/none.toml")


def test_home_with_postgres_keeps_the_password_out_of_the_file_and_takes_psycopg2(tmp_path):
    config = rendered(tmp_path, POSTGRES_URL="postgresql://me:secret@db:5432/x")
    assert config["storage"] == {"postgres": {"postgres_url": {"env": "RQWEN3_POSTGRES_URL"}}}
    assert "secret" not in (tmp_path / "dagster" / "dagster.yaml").read_text()
    assert os.environ["RQWEN3_POSTGRES_URL"] == "postgresql+psycopg2://me:secret@db:5432/x"


@pytest.mark.parametrize("kind", ["nfs4", "panfs", "fuse.juicefs"])
def test_home_on_a_network_file_system_is_refused_for_sqlite_and_taken_for_postgres(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(instance, "file_system_kind", lambda path: kind)
    with pytest.raises(EnvironmentProblem, match="RQWEN3_POSTGRES_URL"):
        rendered(tmp_path)
    assert "postgres" in rendered(tmp_path, POSTGRES_URL="postgresql://me:secret@db/x")["storage"]


@pytest.mark.parametrize("package", ["dagster_postgres", "psycopg2"])
def test_home_with_postgres_but_without_its_package_is_refused_with_the_command_that_brings_it(
    tmp_path, monkeypatch, package
):
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(EnvironmentProblem, match=rf"RQWEN3_POSTGRES_URL .* {package} .*: make install-cluster"):
        rendered(tmp_path, POSTGRES_URL="postgresql://me:secret@db/x")
    assert not (tmp_path / "dagster" / "dagster.yaml").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_instance_is_opened_as_it_was_made_by_a_shell_that_names_no_launcher(tmp_path, monkeypatch, moved):
    home = tmp_path / "home"
    rendered(home, LAUNCHER="slurm")
    made = (home / "dagster" / "dagster.yaml").read_text()
    monkeypatch.delenv("RQWEN3_LAUNCHER")
    if moved:
        home = home.rename(tmp_path / "elsewhere")
    with instance.existing_instance(Settings(home=home)) as opened:
        assert isinstance(opened.run_launcher, SlurmRunLauncher) is not moved
        opened.get_runs_count()
    assert ((home / "dagster" / "dagster.yaml").read_text() == made) is not moved
    assert (home / "dagster" / "storage").is_dir()
    assert not moved or not (tmp_path / "home").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_instance_in_postgres_says_that_the_environment_lacks_its_address(tmp_path, monkeypatch, moved):
    home = tmp_path / "home"
    rendered(home, POSTGRES_URL="postgresql://me:secret@db/x")
    monkeypatch.delenv("RQWEN3_POSTGRES_URL")
    if moved:
        home = home.rename(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="RQWEN3_POSTGRES_URL is not set here"):
        instance.existing_instance(Settings(home=home))
    assert "postgres:" in (home / "dagster" / "dagster.yaml").read_text()
