"""Stamps: how a stage knows that its output is whole, current, and made as it would make it now.

Beside each output lies a JSON stamp, written last: the stage, its settings, the inputs and outputs
with their hashes, and the report. An output without a stamp does not count. An input whose hash
differs from the stamp's makes the stage run again; a setting that differs is refused, since a mix
of old and new pieces is worse than an error. A stamp carries the hash of what it says, since nothing
else vouches for its report. Checking costs one small read and a stat per output.
"""

import glob
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from model.errors import CorpusError
from model.files import canonical_json, read_json, sha256_bytes, sha256_file, write_json
from rqwen3_pipeline.settings import RunRoot

FORMAT_VERSION = 1
_FACTS = ("stage", "settings", "inputs", "outputs", "report")
AGAIN = "rqwen3 corpus build"
MAKE_TOKENIZER = f"materialize `tokenizer` in the UI, or, without Dagster: {AGAIN}"
FETCH = "rqwen3 sources fetch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """What a stage wrote about one of its outputs."""

    stage: str
    """Name of the stage."""
    settings: dict[str, Any]
    """The settings that shaped the output."""
    inputs: dict[str, str]
    """SHA-256 of each input, by its path below the run root."""
    outputs: dict[str, dict[str, Any]]
    """`bytes` and `sha256` of each output, by its path below the run root."""
    report: dict[str, Any]
    """Counts for people and for the manifest; the same on every machine."""

    @property
    def settings_sha256(self) -> str:
        """Hash of the settings."""
        return settings_sha256(self.settings)


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """Hash of settings: equal settings, equal hash."""
    return sha256_bytes(canonical_json(dict(settings)).encode())


def stamp_path(output: Path) -> Path:
    """The stamp of a stage's output: `00000.parquet` has `00000.stamp.json`."""
    return output.with_suffix(".stamp.json")


def tokens_stamp_path(root: RunRoot, source: str, key: str) -> Path:
    """The stamp of a partition of tokens, which lists all its shards."""
    return root.tokens / f"{source}-{key}.stamp.json"


def survivors_stamp_path(root: RunRoot, group: str) -> Path:
    """The stamp of a group's deduplication."""
    return root.path / "survivors" / f"{group}.json"


def relative(root: RunRoot, path: Path) -> str:
    """A path as stamps and manifests write it: below the run root, with forward slashes."""
    return path.relative_to(root.path).as_posix()


def read_stamp(path: Path) -> Stamp | None:
    """Read a stamp; None if there is none.

    Raises:
        CorpusError: the file is damaged, or of another format version.
    """
    if not path.exists():
        return None
    again = f"Make it again: rm -f {shlex.quote(str(path))} && {AGAIN}"
    try:
        content: Any = read_json(path)
    except CorpusError as error:
        raise CorpusError(f"{path}: not valid JSON ({error.__cause__}). {again}") from error
    data = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    if data.get("format_version") != FORMAT_VERSION:
        raise CorpusError(f"{path}: not a stamp of format version {FORMAT_VERSION}. {again}")
    try:
        facts = {name: data[name] for name in _FACTS}
    except KeyError as error:
        raise CorpusError(f"{path}: the stamp lacks {error}. {again}") from error
    if data.get("facts_sha256") not in (None, settings_sha256(facts)):  # None: of a version that wrote no hash
        raise CorpusError(f"{path}: the stamp was changed after it was written. {again}")
    return Stamp(**facts)


def required_stamp(path: Path, what: str, command: str = AGAIN) -> Stamp:
    """Read the stamp of an earlier stage, which `command` makes.

    Raises:
        CorpusError: it is not there; the message says which stage to run.
    """
    stamp = read_stamp(path)
    if stamp is None:
        raise CorpusError(f"{path}: {what} is not made yet. Make it: {command}")
    return stamp


def tokenizer_stamp(root: RunRoot) -> Stamp:
    """The stamp of the run root's tokenizer.

    Raises:
        CorpusError: it is not made yet; the message says how to make it.
    """
    return required_stamp(stamp_path(root.tokenizer), str(root.tokenizer), MAKE_TOKENIZER)


def matches(root: RunRoot, stamp: Stamp, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> bool:
    """Whether the stamped output is whole and is what these settings and inputs would give."""
    if stamp.settings != dict(settings) or stamp.inputs != dict(inputs):
        return False
    for path, facts in stamp.outputs.items():
        file = root.path / path
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            return False
    return True


def current(
    root: RunRoot, path: Path, settings: Mapping[str, Any], inputs: Mapping[str, str], rebuild: bool = False
) -> Stamp | None:
    """The stamp at `path` if its output needs no work, else None.

    Args:
        root: the run root.
        path: of the stamp.
        settings: those of this call.
        inputs: SHA-256 of the inputs as they are now.
        rebuild: take other settings for a reason to make the output again, not for an error.

    Raises:
        CorpusError: the output was made with other settings; the message names the first one that
            differs, both values, and the ways out.
    """
    stamp = read_stamp(path)
    if stamp is None:
        return None
    if stamp.settings != dict(settings) and not rebuild:
        name, old, new = difference(stamp.settings, settings)
        raise CorpusError(
            f"{path}: made with {name} = {old!r}, now {name} = {new!r}. Pieces made with different settings are "
            f"never mixed: set RQWEN3_HOME to another folder, or replace them with: {AGAIN} --rebuild"
        )
    return stamp if matches(root, stamp, settings, inputs) else None


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """The first setting that differs, by its dotted name, and both values."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            before: Any = old.get(name)
            after: Any = new.get(name)
            if isinstance(before, dict) and isinstance(after, dict):
                inner, one, other = difference(cast(dict[str, Any], before), cast(dict[str, Any], after))
                return f"{name}.{inner}", one, other
            return name, cast(Any, before), after
    return "", None, None


def begin(stamp: Path, *outputs: Path) -> None:
    """Make ready to write outputs: they do not count from here on, and killed writers' leftovers go."""
    stamp.unlink(missing_ok=True)
    for path in (stamp, *outputs):
        sweep(path)


def sweep(path: Path) -> None:
    """Delete what killed writers of `path` have left beside it."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        leftover.unlink(missing_ok=True)


def write_stamp(
    root: RunRoot,
    path: Path,
    *,
    stage: str,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    outputs: Sequence[Path],
    report: Mapping[str, Any],
    hashes: Mapping[Path, str] | None = None,
) -> Stamp:
    """Hash the outputs and write the stamp; the output counts from here on.

    Args:
        root: the run root.
        path: of the stamp.
        stage: name of the stage.
        settings: those that shaped the outputs.
        inputs: SHA-256 of the inputs.
        outputs: the files made.
        report: counts for people and for the manifest.
        hashes: SHA-256 of those outputs that were hashed as they were written.
    """
    known = hashes or {}
    stamp = Stamp(
        stage=stage,
        settings=dict(settings),
        inputs=dict(inputs),
        outputs={
            relative(root, p): {"bytes": p.stat().st_size, "sha256": known.get(p) or sha256_file(p)} for p in outputs
        },
        report=dict(report),
    )
    facts: dict[str, Any] = {name: getattr(stamp, name) for name in _FACTS}
    hashes_of = {"settings_sha256": stamp.settings_sha256, "facts_sha256": settings_sha256(facts)}
    write_json(path, {"format_version": FORMAT_VERSION} | facts | hashes_of)
    return stamp


def input_of(root: RunRoot, stamp: Stamp, path: Path) -> dict[str, str]:
    """An earlier stage's output as this stage's input: its path and stamped hash."""
    name = relative(root, path)
    return {name: stamp.outputs[name]["sha256"]}


def verify_inputs(root: RunRoot, inputs: Mapping[str, str]) -> None:
    """Check that each input's bytes are those that were stamped. Reads every byte once.

    What is damaged loses its stamp, so that it does not count any more and the next build makes it anew.

    Raises:
        CorpusError: a file is missing or has other bytes.
    """
    for name, expected in inputs.items():
        path = root.path / name
        if not path.is_file():
            raise CorpusError(f"{path}: stamped, but not there. Make it again: {AGAIN}")
        if (seen := sha256_file(path)) != expected:
            differs = f"{path}: SHA-256 is {seen[:12]}…, not {expected[:12]}… as it was made"
            if not _disown(root, name, expected):
                raise CorpusError(f"{differs}; another process has just replaced it. Run the same command again.")
            raise CorpusError(
                f"{differs}: it is damaged; its stamp was removed. Run the same command again, it is made anew; after "
                f"a command for one stage alone: {AGAIN}"
            )


def _disown(root: RunRoot, name: str, sha256: str) -> bool:
    """Remove the stamp that vouches for a file with this hash; False if none does (any more)."""
    groups = (root.path / "survivors").glob("*.json")
    for path in (stamp_path(root.path / name), *groups):
        stamp = read_stamp(path)
        if stamp is not None and stamp.outputs.get(name, {}).get("sha256") == sha256:
            path.unlink(missing_ok=True)
            return True
    return False
