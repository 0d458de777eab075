"""Dagster's web UI on a Unix socket in a folder of mode 0700: on a shared login node only its owner comes in.

    python -m rqwen3_pipeline.private_web SOCKET WORKSPACE.yaml

`dagster-webserver` listens on TCP ports alone, and a port of the loopback is open to everyone who is
logged in there. The same application is served here; ssh forwards a socket as it does a port.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

LIMITS = {"statement_timeout": 15_000, "pool_recycle": 3_600, "max_overflow": 20}
"""dagster-webserver's own defaults: milliseconds, seconds, connections."""


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn
    from dagster import DagsterInstance
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context
    from dagster_webserver.version import __version__

    listen, workspace = Path(arguments[0]), arguments[1]
    listen.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listen.parent.chmod(0o700)
    listen.unlink(missing_ok=True)
    with DagsterInstance.get() as instance:
        instance.optimize_for_webserver(**LIMITS)
        target = WorkspaceFileTarget(paths=[workspace])
        with WorkspaceProcessContext(instance, version=__version__, workspace_load_target=target) as context:
            app = create_app_from_workspace_process_context(context, "")
            try:
                uvicorn.run(app, uds=str(listen), log_level="warning")
            finally:
                listen.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
