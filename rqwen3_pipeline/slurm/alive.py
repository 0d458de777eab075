"""Whether a SLURM job lives, for the trainer's lock.

    python -m rqwen3_pipeline.slurm.alive JOB_ID

Exit codes: 0 it lives, 1 it is gone, 2 not known (SLURM does not answer). The trainer is handed this
command and knows nothing of SLURM. Costs one to three commands of SLURM.
"""

import sys
from collections.abc import Sequence

from rqwen3_pipeline.slurm.client import Slurm, SlurmError

ALIVE, GONE, UNKNOWN = 0, 1, 2


def job_state_code(job_id: str, slurm: Slurm) -> int:
    """The exit code for a job; a job that neither the controller nor the accounting knows is gone."""
    if not job_id.isdigit():
        print(f"{job_id!r} is no job id; usage: python -m rqwen3_pipeline.slurm.alive JOB_ID", file=sys.stderr)
        return UNKNOWN
    try:
        job = slurm.job(int(job_id))
    except SlurmError as error:
        print(error, file=sys.stderr)
        return UNKNOWN
    if job is None:
        return GONE
    print(job.describe())
    return GONE if job.phase.ended else ALIVE


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    return job_state_code(" ".join(arguments), Slurm())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
