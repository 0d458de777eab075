"""A code location whose assets do what the tests of the launcher need: wait, eat memory, use a GPU, fail, die.

They tell the tests of themselves by files in `<DAGSTER_HOME>/signs/<run id>/`.
"""

import os
import time
from pathlib import Path
from typing import Any

import dagster as dg


def signs(context: dg.AssetExecutionContext) -> Path:
    """The run's folder of files."""
    folder = Path(context.instance.root_directory) / "signs" / context.run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def facts() -> dict[str, Any]:
    """What the process knows of its job."""
    names = ("SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
    return {name: os.environ.get(name, "") for name in names}


@dg.asset
def plain(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Ends at once."""
    print("printed by the step")
    return dg.MaterializeResult(metadata=facts())


@dg.asset(
    op_tags={
        "slurm/partition": "gpu",
        "slurm/gres": "gpu:l40s:1",
        "slurm/qos": "gpu-long",
        "slurm/time": "00:20:00",
        "slurm/cpus_per_task": "2",
        "slurm/mem": "1500M",
    }
)
def on_gpu() -> dg.MaterializeResult:
    """Asks for a GPU."""
    return dg.MaterializeResult(metadata=facts())


@dg.asset
def patient(context: dg.AssetExecutionContext) -> None:
    """Waits until it is released."""
    folder = signs(context)
    (folder / "started").write_text(str(os.getpid()))
    while not (folder / "release").exists():
        time.sleep(0.1)


@dg.asset(op_tags={"slurm/mem": "800M"})
def hungry() -> None:
    """Takes more memory than it asked for."""
    hoard = bytearray(os.urandom(1 << 20)) * 1500
    time.sleep(60)
    del hoard


@dg.asset(op_tags={"slurm/partition": "short", "slurm/time": "00:10:00"})
def too_long() -> None:
    """Asks for more time than its partition gives."""


@dg.asset(op_tags={"slurm/partition": "short", "slurm/time": "00:01:00"})
def overdue(context: dg.AssetExecutionContext) -> None:
    """Runs into its time limit."""
    (signs(context) / "started").touch()
    time.sleep(600)


@dg.asset(op_tags={"slurm/where": "local"})
def at_home() -> dg.MaterializeResult:
    """Stays on this host."""
    return dg.MaterializeResult(metadata=facts())


def _job(asset: dg.AssetsDefinition) -> Any:
    return dg.define_asset_job(f"make_{asset.key.path[-1]}", selection=[asset.key], executor_def=dg.in_process_executor)


@dg.sensor(job_name="make_plain", minimum_interval_seconds=5)
def once(context: dg.SensorEvaluationContext) -> dg.RunRequest:
    """Asks for one run, ever."""
    return dg.RunRequest(run_key="once")


ASSETS = [plain, on_gpu, patient, hungry, too_long, overdue, at_home]
defs = dg.Definitions(
    assets=ASSETS, jobs=[_job(asset) for asset in ASSETS], sensors=[once], executor=dg.in_process_executor
)
