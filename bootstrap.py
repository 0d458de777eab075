"""Makes `.venv` and installs the project into it: `python3 bootstrap.py EXTRA…`.

Runs under any Python 3, so that an old one can be told what is missing. A finished installation
leaves a stamp with the hash of what it was made from; an unchanged one costs nothing.
"""

import hashlib
import os
import shutil
import subprocess
import sys

OLDEST = (3, 11)
NEEDED_GIB = 4.0
HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")


def fail(message):
    """End with one sentence."""
    sys.exit("bootstrap: " + message)


def check_machine():
    """Refuse what can't work, before anything is written."""
    if sys.version_info < OLDEST:
        fail(
            "this is Python %d.%d (%s), the project needs 3.11 or newer. Install one (Debian: apt-get install "
            "python3.11-venv; without root: uv or conda) and name it: make PYTHON=python3.11 …"
            % (sys.version_info[0], sys.version_info[1], sys.executable)
        )
    try:
        import ensurepip  # noqa: F401 - only whether it is there
        import venv  # noqa: F401
    except ImportError:
        fail("this Python has no venv module. Debian: apt-get install python3-venv")
    free_gib = shutil.disk_usage(HERE).free / 2.0**30
    if free_gib < NEEDED_GIB:
        fail(
            "%.1f GiB free in %s, the installation needs %.0f. Free some space, or clone into a larger file system."
            % (free_gib, HERE, NEEDED_GIB)
        )


def fingerprint(extras):
    """Hash of everything that decides what gets installed."""
    digest = hashlib.sha256(repr((sys.version, HERE, sorted(extras))).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(HERE, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def main(extras):
    """Install the project with `extras`, unless that very installation is there."""
    stamp = os.path.join(VENV, ".installed-" + "-".join(sorted(extras)))
    wanted = fingerprint(extras)
    if os.path.exists(stamp):
        with open(stamp) as file:
            if file.read() == wanted:
                return
    check_machine()
    print("Installing into .venv (some minutes, about 2.5 GB; more where torch comes with CUDA) …", flush=True)
    if not os.path.exists(os.path.join(VENV, "bin", "python")):
        subprocess.check_call([sys.executable, "-m", "venv", VENV])
    python = os.path.join(VENV, "bin", "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
    try:
        subprocess.check_call([*pip, "-e", ".[%s]" % ",".join(extras)], cwd=HERE)
    except subprocess.CalledProcessError as error:
        fail("pip ended with %d; its last lines say why. Mend that and run the same command again." % error.returncode)
    with open(stamp, "w") as file:
        file.write(wanted)


if __name__ == "__main__":
    main(sys.argv[1:] or ["training"])
