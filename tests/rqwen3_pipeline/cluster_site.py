"""An instance of Dagster whose runs are jobs of a test cluster, with the code location of `cluster_location`."""

from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from rqwen3_pipeline.settings import shipped
from tests.dagster_server import REPOSITORY, DagsterServer
from tests.slurm_cluster import SlurmCluster

MOST_RUNS = 6


def write_home(root: Path, cluster: SlurmCluster | None, poll_s: int, storage: dict[str, Any] | None = None) -> Path:
    """Write `<root>/dagster/dagster.yaml` from the shipped template, with the launcher, and create the storage.

    Args:
        root: the run root.
        cluster: where runs go; None leaves Dagster's default launcher.
        poll_s: seconds between two looks of the daemon.
        storage: of the template, or this one.
    """
    home = root / "dagster"
    home.mkdir(parents=True)
    template = shipped("dagster.yaml").read_text(encoding="utf-8").replace("{{ home }}", str(home))
    config = yaml.safe_load(template)
    config["run_monitoring"]["poll_interval_seconds"] = poll_s
    coordinator = config["run_coordinator"]["config"]
    coordinator |= {"max_concurrent_runs": MOST_RUNS, "dequeue_interval_seconds": 1, "dequeue_use_threads": True}
    coordinator |= {"max_user_code_failure_retries": 100, "user_code_failure_retry_delay": 5}
    if storage is not None:
        config["storage"] = storage
    if cluster is not None:
        launcher = {"home": str(root), "timeout_seconds": 10}
        config["run_launcher"] = {"module": "rqwen3_pipeline.launcher", "class": "SlurmRunLauncher", "config": launcher}
    (home / "dagster.yaml").write_text(yaml.safe_dump(config))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs_count()  # creates the tables before several processes open it
    return home


def make_cluster_server(root: Path, cluster: SlurmCluster, **options: Any) -> DagsterServer:
    """Webserver and daemon on a new run root, not started."""
    home = write_home(root, cluster, **options)
    module = {"module_name": "tests.rqwen3_pipeline.cluster_location", "location_name": "cluster"}
    workspace = root / "workspace.yaml"
    load = [{"python_module": {**module, "working_directory": str(REPOSITORY)}}]
    workspace.write_text(yaml.safe_dump({"load_from": load}))
    environment = {key: value for key, value in cluster.full_environment().items() if key in ("PATH", "SLURM_CONF")}
    return DagsterServer(home, workspace, "cluster", environment)
