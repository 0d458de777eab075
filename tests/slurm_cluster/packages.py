"""Whether SLURM is installed here. In CI it must be; elsewhere the tests that need it are skipped, with the way out."""

import os
import shutil

import pytest

from model.errors import EnvironmentProblem

BASE = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
"""Debian's package of each program that is needed."""
REQUIRED = "RQWEN3_REQUIRE_SLURM"
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def search_path() -> str:
    """PATH with the folders of daemons, which an ordinary user's often lacks."""
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def missing_packages(*, accounting: bool = False) -> list[str]:
    """Debian's packages whose programs are not here."""
    programs = {**BASE, **(ACCOUNTING if accounting else {})}
    return sorted({package for name, package in programs.items() if not shutil.which(name, path=search_path())})


def check_packages(*, accounting: bool = False) -> None:
    """Refuse to go on without SLURM.

    Raises:
        EnvironmentProblem: a program is missing; the message names the packages.
    """
    if missing := missing_packages(accounting=accounting):
        raise EnvironmentProblem(
            f"no SLURM on this machine; get it with: apt-get install -y --no-install-recommends {' '.join(missing)}"
        )


def require_slurm(*, accounting: bool = False) -> None:
    """Skip the calling test without SLURM, or fail it where RQWEN3_REQUIRE_SLURM=1 says that it must be here."""
    try:
        check_packages(accounting=accounting)
    except EnvironmentProblem as problem:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {problem}")
        pytest.skip(str(problem))
