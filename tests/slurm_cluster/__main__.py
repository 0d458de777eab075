"""`python -m tests.slurm_cluster start|stop|status DIR`: a cluster to try things on."""

import argparse
import shutil
import sys
from pathlib import Path

from model.errors import RQwen3Error
from tests.slurm_cluster import ClusterSettings, SlurmCluster


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_cluster", description=__doc__)
    parser.add_argument("action", choices=("start", "stop", "status"))
    parser.add_argument("dir", type=Path, metavar="DIR", help="the cluster's folder, with a short path")
    parser.add_argument("--nodes", type=int, default=ClusterSettings().nodes)
    parser.add_argument("--gpus", type=int, default=ClusterSettings().gpus, help="of each node, at most 4")
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd on MariaDB")
    options = parser.parse_args()
    settings = ClusterSettings(nodes=options.nodes, gpus=options.gpus, accounting=options.accounting)
    cluster = SlurmCluster(options.dir.absolute(), settings)
    try:
        return {"start": _start, "stop": _stop, "status": _status}[options.action](cluster)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _start(cluster: SlurmCluster) -> int:
    if cluster.alive():
        print(f"{cluster.files.folder}: a cluster runs here already", file=sys.stderr)
        return 1
    try:
        cluster.start()
    except BaseException:
        cluster.stop(delete=False)
        raise
    print(f"export SLURM_CONF={cluster.files.conf}   # then sinfo, sbatch, squeue … as anywhere")
    return 0


def _stop(cluster: SlurmCluster) -> int:
    if not cluster.files.conf.exists():
        print(f"{cluster.files.folder}: no cluster here", file=sys.stderr)
        return 1
    cluster.stop(delete=False)
    shutil.rmtree(cluster.files.folder)
    return 0


def _status(cluster: SlurmCluster) -> int:
    alive = cluster.alive()
    print(f"running: {', '.join(alive) or 'nothing'}")
    if "slurmctld" in alive:
        print(cluster.run("sinfo", "-N", "-l").stdout + cluster.run("squeue", "-a").stdout, end="")
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
