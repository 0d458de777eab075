"""What the cluster looks like, and the configuration files that say so to SLURM.

Several slurmd share the host: each has a name (`slurmd -N`), a port and folders of its own
(`%n`). The nodes may claim more CPUs than there are (`config_overrides`). A GPU is any character device;
those that every Linux has will do, and need no privilege. Memory limits are kept by the accounting
of processes, since control groups are seldom ours to use.
"""

import getpass
import socket
from dataclasses import dataclass
from pathlib import Path

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
GPU_TYPE = "l40s"
CLUSTER, ACCOUNT = "fake", "students"
QOS = {"gpu-long": "MaxWall=2-00:00:00 MaxTRESPerJob=gres/gpu=1", "gpu-short": "MaxWall=00:30:00"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """Size and timing of the cluster."""

    nodes: int = 3
    """Named node1, node2, …"""
    cpus: int = 4
    """CPUs that each node claims."""
    memory_mib: int = 8000
    """Memory that each node claims."""
    gpus: int = 2
    """GPUs of each node, at most four."""
    accounting: bool = False
    """With slurmdbd on a MariaDB: QoS, limits and sacct."""
    kill_wait_s: int = 10
    """Between the TERM at a job's time limit and the KILL."""
    min_job_age_s: int = 300
    """How long the controller remembers an ended job."""
    slurmd_timeout_s: int = 20
    """How long a node may be silent before it is down."""

    def node_names(self) -> list[str]:
        """The nodes, in order."""
        return [f"node{i + 1}" for i in range(self.nodes)]


@dataclass(frozen=True, slots=True)
class Files:
    """Where things lie in the cluster's folder."""

    folder: Path

    @property
    def conf(self) -> Path:
        """slurm.conf, for SLURM_CONF."""
        return self.folder / "slurm.conf"

    @property
    def job_log(self) -> Path:
        """A line for each job that has ended."""
        return self.folder / "log" / "jobs"

    @property
    def munge_socket(self) -> Path:
        """Socket of the own munged."""
        return self.folder / "munge.socket"

    @property
    def mysql_socket(self) -> Path:
        """Socket of the own MariaDB."""
        return self.folder / "mysql.socket"

    @property
    def processes(self) -> Path:
        """The daemons by name: process number and start time."""
        return self.folder / "processes.json"

    def log(self, name: str) -> Path:
        """A daemon's log."""
        return self.folder / "log" / f"{name}.log"


def short_host_name() -> str:
    """This host as SLURM's daemons find themselves in their configuration."""
    return socket.gethostname().split(".")[0]


def free_ports(count: int) -> list[int]:
    """Ports of loopback on which nothing listens, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def slurm_conf(files: Files, settings: ClusterSettings, ports: list[int]) -> str:
    """The text of slurm.conf; `ports` are the controller's, slurmdbd's, and one a node."""
    host, user, folder = short_host_name(), getpass.getuser(), files.folder
    lines = [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        f"SlurmctldPort={ports[0]}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={files.munge_socket}",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/pid/slurmctld.pid",
        f"SlurmdPidFile={folder}/pid/%n.pid",
        f"SlurmctldLogFile={files.log('slurmctld')}",
        f"SlurmdLogFile={folder}/log/%n.log",
        "SlurmctldDebug=info",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=5",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={files.job_log}",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=2",
        "JobAcctGatherParams=OverMemoryKill",
        "ReturnToService=2",
        "DefMemPerCPU=1000",
        f"KillWait={settings.kill_wait_s}",
        f"MinJobAge={settings.min_job_age_s}",
        f"SlurmdTimeout={settings.slurmd_timeout_s}",
        "GresTypes=gpu",
    ]
    gres = f" Gres=gpu:{GPU_TYPE}:{settings.gpus}" if settings.gpus else ""
    size = f"CPUs={settings.cpus} RealMemory={settings.memory_mib}{gres} State=UNKNOWN"
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {size}"
        for name, port in zip(settings.node_names(), ports[2:], strict=True)
    ]
    everywhere = f"Nodes={','.join(settings.node_names())}"
    lines += [
        f"PartitionName=cpu {everywhere} State=UP Default=YES MaxTime=1-00:00:00 DefaultTime=00:10:00",
        f"PartitionName=gpu {everywhere} State=UP MaxTime=1-00:00:00 DefaultTime=00:10:00",
        f"PartitionName=short {everywhere} State=UP MaxTime=00:02:00",
        f"PartitionName=closed {everywhere} State=DOWN MaxTime=1-00:00:00 DefaultTime=00:10:00",
    ]
    if settings.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={ports[1]}",
            f"AccountingStoragePass={files.munge_socket}",
            "AccountingStorageEnforce=limits,qos",
            "AccountingStorageTRES=gres/gpu",
        ]
    return "\n".join(lines) + "\n"


def gres_conf(settings: ClusterSettings) -> str:
    """The text of gres.conf."""
    if not settings.gpus:
        return ""
    nodes = ",".join(settings.node_names())
    return "".join(f"NodeName={nodes} Name=gpu Type={GPU_TYPE} File={device}\n" for device in DEVICES[: settings.gpus])


def slurmdbd_conf(files: Files, port: int) -> str:
    """The text of slurmdbd.conf."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={files.munge_socket}",
            f"DbdHost={short_host_name()}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={port}",
            f"SlurmUser={getpass.getuser()}",
            f"LogFile={files.log('slurmdbd')}",
            f"PidFile={files.folder}/pid/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            f"StorageUser={getpass.getuser()}",
            "StorageLoc=slurm_acct",
            "",
        ]
    )
