"""A real SLURM cluster on this host, of Debian's packages, for the tests and for people who want to try things.

munge, slurmctld and several slurmd run as the calling user with a configuration of their own in one
folder: no systemd, nothing under /etc, ports that were free, every process stopped by its number.
`python -m tests.slurm_cluster start DIR` does the same by hand. Starts in about a second; with
accounting (slurmdbd on a MariaDB of its own) in about ten.
"""

from tests.slurm_cluster.cluster import SlurmCluster as SlurmCluster
from tests.slurm_cluster.packages import require_slurm as require_slurm
from tests.slurm_cluster.settings import ClusterSettings as ClusterSettings
