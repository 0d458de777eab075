"""The Dagster instance of a run root: rendered from the template, created once, swept of dead runs.

Eight processes that open a fresh SQLite home at once crash, so the home is created here before
anything else opens it. SQLite on a network file system loses locks, so that is refused.
"""

import json
import os
import socket
from pathlib import Path

import dagster as dg
import yaml
from dagster import DagsterRunStatus, RunsFilter

from model.errors import EnvironmentProblem
from model.files import file_system_kind, is_network, write_text
from model.process import boot_id, has_ended, process_start
from rqwen3_pipeline.settings import RunRoot, Settings, postgres_problem, shipped
from rqwen3_pipeline.slurm.cluster import Cluster, load_cluster

LOCAL_CONFIG = "dagster.local.yaml"
LOCAL_RUNS = 2
"""Runs at once on this host."""
CANCEL_MARGIN_S = 600
"""How much longer than a training job may take to save Dagster waits for the end of a cancelled run."""
POSTGRES_URL = "RQWEN3_POSTGRES_URL"
OWNER_TAG = "rqwen3/owner"
"""Tag of a run that lives in a local process: `<host>/<boot of the machine>/<pid>/<start of the process>`."""


def render_home(root: RunRoot) -> Path:
    """Write `<run root>/dagster/dagster.yaml` from the template and the environment, and return the folder.

    Raises:
        EnvironmentProblem: the folder is on a network file system, where SQLite is not safe; or Postgres is asked
            for, and the packages for it are not installed.
        ConfigError: runs are SLURM jobs, and the site's file can't be read.
    """
    import jinja2

    home = root.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    settings = Settings()
    kind = file_system_kind(home)
    if settings.postgres_url is not None:
        if (problem := postgres_problem()) is not None:
            raise EnvironmentProblem(problem)
        os.environ[POSTGRES_URL] = _psycopg2(settings.postgres_url.get_secret_value())
    elif is_network(kind):
        raise EnvironmentProblem(
            f"{home} lies on {kind}, a network file system, under which SQLite loses its locks. Set RQWEN3_HOME to "
            f"a folder on a local disk, or {POSTGRES_URL} to a Postgres database that all hosts reach."
        )
    slurm = settings.launcher == "slurm"
    site = load_cluster(settings.cluster) if slurm and settings.cluster else Cluster()
    template = jinja2.Template(shipped("dagster.yaml").read_text(encoding="utf-8"), keep_trailing_newline=True)
    text = template.render(
        quoted=lambda value: json.dumps(value, ensure_ascii=False),  # as YAML reads it too
        home=str(home),
        postgres=settings.postgres_url is not None,
        slurm=slurm,
        max_runs=settings.max_jobs if slurm else LOCAL_RUNS,
        launcher=_launcher_config(root, settings, site),
        cancel_timeout_s=site.waits["save_budget_seconds"] + CANCEL_MARGIN_S,
    )
    target = home / "dagster.yaml"
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        write_text(target, text)
    return home


def _launcher_config(root: RunRoot, settings: Settings, site: Cluster) -> dict[str, str | int]:
    config = {"home": str(root.path), "profile": str(settings.config_path), **site.waits}
    return {**config, "cluster": str(settings.cluster)} if settings.cluster else config


def _psycopg2(url: str) -> str:
    """The same database through psycopg2: under the newer driver Dagster's event watcher fails."""
    return f"postgresql+psycopg2://{url.removeprefix('postgresql://')}" if url.startswith("postgresql://") else url


def open_instance(root: RunRoot) -> dg.DagsterInstance:
    """The instance of a run root, its storage created; sets DAGSTER_HOME for this process and its children."""
    os.environ["DAGSTER_HOME"] = str(render_home(root))
    return _opened(dg.DagsterInstance.get())


def existing_instance(settings: Settings) -> dg.DagsterInstance:
    """The instance as it lies in the run root, whatever launcher and site this process's environment names.

    Only one that was never rendered, or lies elsewhere than then, is rendered as `open_instance` does it.

    Raises:
        EnvironmentProblem: its events are in Postgres, and the environment doesn't say where.
    """
    home = settings.root.dagster_home
    if not (home / "dagster.yaml").exists():
        return open_instance(settings.root)
    config = yaml.safe_load((home / "dagster.yaml").read_text(encoding="utf-8"))
    if settings.postgres_url is not None:
        os.environ[POSTGRES_URL] = _psycopg2(settings.postgres_url.get_secret_value())
    elif "postgres" in config["storage"]:
        raise EnvironmentProblem(
            f"{home} keeps its events in Postgres, and {POSTGRES_URL} is not set here. Set it as for rqwen3 up."
        )
    if config["local_artifact_storage"]["config"]["base_dir"] != str(home):
        return open_instance(settings.root)
    return dg.DagsterInstance.from_config(str(home))


def open_local_instance(root: RunRoot) -> dg.DagsterInstance:
    """The same instance for runs inside this process: what they print goes to the terminal and is not captured.

    Capturing would take standard error away from the progress bars, and start two processes a run.
    """
    home = render_home(root)
    os.environ["DAGSTER_HOME"] = str(home)
    config = yaml.safe_load((home / "dagster.yaml").read_text(encoding="utf-8"))
    config["compute_logs"] = {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
    write_text(home / LOCAL_CONFIG, yaml.safe_dump(config))
    return _opened(dg.DagsterInstance.from_config(str(home), LOCAL_CONFIG))


def _opened(instance: dg.DagsterInstance) -> dg.DagsterInstance:
    instance.get_runs_count()  # creates the tables
    return instance


def owner() -> str:
    """This process, so that a later one can tell whether it still lives."""
    return f"{socket.gethostname()}/{boot_id()}/{os.getpid()}/{process_start(os.getpid())}"


def fail_orphans(instance: dg.DagsterInstance) -> list[str]:
    """Mark as failed the runs whose local process has died, and return their ids.

    A process that is killed leaves its run as started for ever. Runs of other hosts are left alone.
    """
    live = [
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    ]
    failed: list[str] = []
    for run in instance.get_runs(RunsFilter(statuses=live)):
        holder = run.tags.get(OWNER_TAG)
        if holder is not None and _is_gone(holder):
            instance.report_run_failed(
                run, message=f"The process that ran it ({holder}) is gone; run the same command again."
            )
            failed.append(run.run_id)
    return failed


def _is_gone(holder: str) -> bool:
    host, *process = holder.split("/")
    if host != socket.gethostname():
        return False
    if len(process) != 3:  # an earlier version's, which told a time of day
        return True
    boot, pid, start = process
    return boot != str(boot_id()) or has_ended(int(pid), int(start))
