"""A copy of the program's sources, taken when a job is submitted: a queued job must not run tomorrow's edit.

The folder is named after the hash of what is in it, so that a hundred jobs of one state of the sources
share one copy. Some 300 small files: 30 ms to hash, 2 MB once. Old copies are left; nothing but jobs
that have ended needs them, and they may be deleted by hand when no job waits.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from model.files import canonical_json, sha256_bytes, sha256_file, sweep_dead, write_text

PACKAGES = ("rqwen3_pipeline", "model")
BESIDE = ("configs", "sbatch", "dagster.yaml", "workspace.yaml")
"""What a checkout has beside the packages; a wheel holds it inside."""


def take_snapshot(base: Path, into: Path, files: Mapping[str, Path] | None = None) -> Path:
    """Copy the sources, unless this very state was copied before.

    Args:
        base: the folder that holds the packages: a checkout, or site-packages.
        into: the folder of all snapshots.
        files: further files by the name that they get in the snapshot.

    Returns:
        The snapshot's folder.
    """
    wanted = {**{path.relative_to(base).as_posix(): path for path in _sources(base)}, **(files or {})}
    hashes = {name: sha256_file(path) for name, path in sorted(wanted.items())}
    folder = into / sha256_bytes(canonical_json(hashes).encode())[:16]
    sweep_dead(folder)
    if folder.is_dir():
        return folder
    into.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=into))
    for name, path in wanted.items():
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    write_text(partial / "COMMIT", _commit(base) or "")
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)  # another process was faster with the same content
    return folder


def _sources(base: Path) -> Iterator[Path]:
    for name in (*PACKAGES, *BESIDE):
        path = base / name
        found = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
        yield from (file for file in found if file.is_file() and "__pycache__" not in file.parts)


def _commit(base: Path) -> str | None:
    """The commit of a checkout; None elsewhere."""
    if not (base / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=base, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
