"""A run root whose runs are jobs of a test cluster: rendered as the product does, served with two code locations.

One location is the project's own, over a tiny corpus; the other one, `cluster_location`, does what the tests
of the launcher need.
"""

import os
import sys
from pathlib import Path

import pytest
import yaml

from rqwen3_pipeline.assets.sources import register_partitions
from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.instance import open_instance
from rqwen3_pipeline.settings import Settings
from tests.dagster_server import REPOSITORY, DagsterServer, wait_for
from tests.rqwen3_pipeline.corpus.made import prose, write
from tests.rqwen3_pipeline.site import Site, make_site
from tests.slurm_cluster import SlurmCluster

MOST_RUNS = 6
FILES = 24
OWN, OF_TESTS = "rqwen3", "cluster"
CLUSTER_FILE = """
[cluster]
name = "fake"
[options]
partition = "cpu"
time = "00:10:00"
[options.gpu]
partition = "gpu"
gres = "gpu:l40s:1"
time = "00:30:00"
[options.transfer]
where = "local"
"""


def make_cluster_site(folder: Path) -> Site:
    """A site with a description of the cluster, and a source in `FILES` files."""
    site = make_site(folder)
    for i in range(FILES - 2):
        rows = [{"url": f"m/{i}/{j}", "text": prose(100_000 + 100 * i + j, 70)} for j in range(20)]
        write(site.sources / "openwebmath" / f"z{i:02d}" / "p.parquet", rows)
    (folder / "cluster.toml").write_text(CLUSTER_FILE)
    return site


def environment(site: Site, cluster: SlurmCluster, **more: str) -> dict[str, str]:
    """What the processes of an instance are told."""
    told = {"RQWEN3_LAUNCHER": "slurm", "RQWEN3_CLUSTER": str(site.folder / "cluster.toml")}
    told |= {"RQWEN3_MAX_JOBS": str(MOST_RUNS), "RQWEN3_HOME": str(site.home), "RQWEN3_PROFILE": str(site.profile)}
    told |= {"RQWEN3_WORKERS": "1", "RQWEN3_SCRATCH": str(site.folder), "RQWEN3_VENV": sys.prefix}
    return {**told, "PATH": cluster.full_environment()["PATH"], **cluster.environment, **more}


class ServedSite(DagsterServer):
    """Webserver and daemon on a site whose corpus is made; runs become jobs of the cluster."""

    def __init__(self, folder: Path, cluster: SlurmCluster, **more: str) -> None:
        self.cluster, self.site = cluster, make_cluster_site(folder)
        told = environment(self.site, cluster, **more)
        with pytest.MonkeyPatch.context() as patch:
            for key, value in {**told, "DAGSTER_HOME": ""}.items():
                patch.setenv(key, value)
            built = self.site.rqwen3("corpus", "build", "--sources", str(self.site.sources))
            assert built.returncode == 0, built.stderr
            with open_instance(Settings().root) as instance:
                instance.add_dynamic_partitions("submissions", [f"tiny.{i:02d}" for i in range(1, 10)])
                locked = read_lock(Settings().root)
                register_partitions(instance, locked)
            home = Path(os.environ["DAGSTER_HOME"])
        modules = {OWN: "rqwen3_pipeline.definitions", OF_TESTS: "tests.rqwen3_pipeline.cluster_location"}
        load = [
            {"python_module": {"module_name": module, "location_name": name, "working_directory": str(REPOSITORY)}}
            for name, module in modules.items()
        ]
        workspace = folder / "workspace.yaml"
        workspace.write_text(yaml.safe_dump({"load_from": load}))
        super().__init__(home, workspace, OF_TESTS, told)

    def sign(self, run: str, name: str) -> Path:
        """A file by which an asset of the tests tells of itself, or is told something."""
        return self.home / "signs" / run / name

    def started(self, run: str) -> int:
        """Wait for the asset's body; returns the worker's process number."""
        path = self.sign(run, "started")

        def there() -> bool:
            assert self.run(run)["status"] not in ("FAILURE", "CANCELED"), self.story(run)
            return path.exists() and bool(path.read_text())

        wait_for(there, f"run {run[:8]} to begin")
        return int(path.read_text())

    def release(self, run: str) -> None:
        """Let a patient asset end."""
        self.sign(run, "release").touch()

    def job_id(self, run: str) -> str:
        """The job's id, from the run's tag."""
        return wait_for(lambda: self.run(run)["tags"].get("slurm/job_id"), f"the job of run {run[:8]}")

    def jobs_of(self, run: str) -> list[dict[str, str]]:
        """All jobs that SLURM has or had for a run, by their comments."""
        return [job for job in self.cluster.jobs() if run in job["comment"]]

    def ended_job(self, run: str) -> dict[str, str]:
        """The run's job, once it has ended."""
        return self.cluster.wait_for_state(self.job_id(run))
