"""slurmdbd on a MariaDB of its own: accounts, QoS and limits. MariaDB listens on a socket alone."""

import getpass
import subprocess
from collections.abc import Callable

from model.errors import EnvironmentProblem
from tests.slurm_cluster.daemons import Daemons
from tests.slurm_cluster.packages import search_path
from tests.slurm_cluster.settings import ACCOUNT, CLUSTER, QOS, Files

READY_S = 120.0
Wait = Callable[[Callable[[], bool], str, float, Callable[[], str]], None]


def start(daemons: Daemons, files: Files, wait: Wait) -> None:
    """Make the database, start it and slurmdbd.

    Raises:
        EnvironmentProblem: one of the two does not come up.
    """
    user, data = getpass.getuser(), files.folder / "mysql"
    install = ["mariadb-install-db", "--no-defaults", f"--user={user}", f"--datadir={data}", "--skip-test-db"]
    install += ["--auth-root-authentication-method=normal"]
    done = subprocess.run(install, capture_output=True, text=True, env={"PATH": search_path()}, check=False)
    if done.returncode:
        raise EnvironmentProblem(f"mariadb-install-db: exit code {done.returncode}: {done.stderr}{done.stdout}")
    server = ["mariadbd", "--no-defaults", f"--user={user}", f"--datadir={data}", f"--socket={files.mysql_socket}"]
    server += ["--skip-networking", "--skip-grant-tables", "--innodb-flush-log-at-trx-commit=0"]
    server += [f"--pid-file={files.folder}/pid/mariadbd.pid", f"--log-error={files.log('mariadbd')}"]
    daemons.start("mariadbd", server)

    def answers() -> bool:
        daemons.require_alive("mariadbd")
        ask = ["mariadb-admin", "--no-defaults", f"--socket={files.mysql_socket}", "ping"]
        return subprocess.run(ask, capture_output=True, env={"PATH": search_path()}, check=False).returncode == 0

    wait(answers, "MariaDB to answer", READY_S, lambda: daemons.tail("mariadbd"))
    environment = {"MYSQL_UNIX_PORT": str(files.mysql_socket), "SLURM_CONF": str(files.conf)}
    daemons.start("slurmdbd", ["slurmdbd", "-D"], environment)

    def listens() -> bool:
        daemons.require_alive("slurmdbd")
        log = files.log("slurmdbd")
        return log.exists() and "started" in log.read_text(encoding="utf-8", errors="replace")

    wait(listens, "slurmdbd to start", READY_S, lambda: daemons.tail("slurmdbd"))


def add_accounts(run: Callable[..., "subprocess.CompletedProcess[str]"], wait: Wait) -> None:
    """Register the cluster, the QoS and this user, whose default account may use all of them."""

    def registered() -> bool:
        return CLUSTER in run("sacctmgr", "-nP", "show", "cluster", "format=cluster", check=False).stdout

    wait(registered, "the cluster to be registered", READY_S, lambda: "")
    for name, limits in QOS.items():
        run("sacctmgr", "-i", "add", "qos", name, *limits.split())
    run("sacctmgr", "-i", "add", "account", ACCOUNT, "Description=students", "Organization=here")
    user, allowed = getpass.getuser(), ",".join(["normal", *QOS])
    run("sacctmgr", "-i", "add", "user", user, f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}", f"QOS={allowed}")
    run("sacctmgr", "-i", "modify", "user", user, "set", f"DefaultAccount={ACCOUNT}")
