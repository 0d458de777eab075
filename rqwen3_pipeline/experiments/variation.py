"""An experiment made from another: the same configuration but for some keys, and every piece it can share.

Where only model or training differ, the new experiment lives in the same run root, over the same
manifest. Where the corpus differs it gets a run root of its own, into which all pieces are linked that
would come out the same: those whose stamps state the new settings and whose inputs were linked too.
Links cost no space, and nothing is ever written into a finished piece. That run root is made under a
temporary name, so one that was killed is no hindrance to the next try.
"""

import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import RunConfig, load_run_config
from model.errors import ConfigError, CorpusError
from model.files import fsync_folder, read_json, sweep_dead, temporary_path, write_json, write_text
from rqwen3_pipeline.corpus.lock import Lock, save_lock
from rqwen3_pipeline.corpus.pieces import Item, is_current, items_of
from rqwen3_pipeline.corpus.sources import STAGES, CorpusConfig, budgets, corpus_config
from rqwen3_pipeline.corpus.stamps import read_stamp, relative, stamp_path, survivors_stamp_path, tokens_stamp_path
from rqwen3_pipeline.results import evaluation_config
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.training import submissions_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """A new experiment."""

    name: str
    root: Path
    """Its run root."""
    config: Path
    """Its configuration."""
    shared: Mapping[str, tuple[int, int]]
    """Of each stage the pieces that are linked, and how many there are; empty where the run root is shared whole."""


def changed_sections(sections: Mapping[str, Any], name: str, settings: Sequence[str]) -> dict[str, Any]:
    """A configuration with `section.key=value` settings applied and another name.

    Values are TOML (`4`, `3e-4`, `"text"`, `[1, 2]`); what is no TOML is text. Setting `data.<source>`
    to `none` leaves that source out.

    Raises:
        ConfigError: a setting is not of that form.
    """
    changed: dict[str, Any] = {section: _copy(values) for section, values in sections.items()}
    changed.setdefault("run", {})["name"] = name
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise ConfigError(f"--set {setting!r}: give section.key=value, as data.fineweb_edu.min_score=4")
        table = changed
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {setting!r}: {key!r} is a value, not a section")
        if text.strip() == "none":
            table.pop(keys[-1], None)
        else:
            table[keys[-1]] = _value(text.strip())
    return changed


def make_variation(root: RunRoot, base: RunConfig, name: str, settings: Sequence[str], origin: str) -> Variation:
    """Write the configuration of a new experiment, and link what it can share.

    Args:
        root: the run root of the experiment it is made from.
        base: that experiment's configuration.
        name: of the new one.
        settings: `section.key=value`, each.
        origin: what to say it was made from.

    Raises:
        ConfigError: the name is taken, or a setting is not valid.
    """
    sections = changed_sections(base.sections, name, settings)
    text = _toml(sections, f"# Experiment {name}: {origin} with {', '.join(settings) or 'nothing changed'}.")
    run = _parsed(text)
    same_corpus = corpus_config(run) == corpus_config(base) and budgets_of(run) == budgets_of(base)
    target = root if same_corpus else RunRoot(root.path.parent / name)
    config = target.experiment(name) / "config.toml"
    if config.exists() or (not same_corpus and target.path.exists()):
        raise ConfigError(f"{config.parent if same_corpus else target.path}: there already. Choose another name.")
    if same_corpus:
        write_text(config, text)
        return Variation(name=name, root=target.path, config=config, shared={})
    sweep_dead(target.path)
    draft = RunRoot(temporary_path(target.path))
    try:
        shared = share_pieces(root, draft, base, run)
        write_text(draft.experiment(name) / "config.toml", text)
        known = read_json(root.variations) if root.variations.exists() else {}
        write_json(root.variations, known | {name: os.path.relpath(target.path, root.path)})
        draft.path.rename(target.path)
        fsync_folder(target.path.parent)
    finally:
        shutil.rmtree(draft.path, ignore_errors=True)
    return Variation(name=name, root=target.path, config=config, shared=shared)


def budgets_of(run: RunConfig) -> dict[str, int]:
    """Tokens that a run wants of each source."""
    return budgets(corpus_config(run), run.training)


def _parsed(text: str) -> RunConfig:
    """Refuse a configuration as if it were read, before anything is written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, encoding="utf-8")
        try:
            run = load_run_config(path)
            for parse in (corpus_config, submissions_config, evaluation_config):
                parse(run)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{path}: ", "the new configuration: ")) from error
    return run


def share_pieces(old: RunRoot, new: RunRoot, base: RunConfig, run: RunConfig) -> dict[str, tuple[int, int]]:
    """Link into a new run root every piece of an old one that the new configuration would make the same.

    Returns:
        Of each stage, how many pieces are there now and how many there are in all; empty where the
        files themselves have to be locked anew.
    """
    before, after = corpus_config(base), corpus_config(run)
    lock = _share_lock(old, new, before, after)
    if lock is None:
        return {}
    pinned = after.tokenizer.kind == "pinned"  # a trained one depends on the documents that are to be made anew
    if pinned and after.settings_for("tokenizer") == before.settings_for("tokenizer"):
        for path in (old.tokenizer, stamp_path(old.tokenizer)):
            _link(path, new.path / path.name)
    shared: dict[str, tuple[int, int]] = {}
    for stage in STAGES[:-1]:
        items = items_of(stage, after, lock)
        shared[stage] = (sum(_share_piece(stage, item, old, new, after, lock) for item in items), len(items))
    return shared


def _share_lock(old: RunRoot, new: RunRoot, before: CorpusConfig, after: CorpusConfig) -> Lock | None:
    """The old lock reduced to the new sources, if each of them would be locked as it was."""
    if not old.lock.exists() or (before.origin, before.lock_seed) != (after.origin, after.lock_seed):
        return None
    content = read_json(old.lock)
    same = (name in content["sources"] and before.hub.get(name) == after.hub.get(name) for name in after.sources)
    if not all(same):
        return None
    _link(old.path / "raw" / "origin.json", new.path / "raw" / "origin.json")
    return save_lock(new, content | {"sources": {name: content["sources"][name] for name in after.sources}})


def _share_piece(stage: str, item: Item, old: RunRoot, new: RunRoot, config: CorpusConfig, lock: Lock) -> bool:
    """Link a piece with its stamp; whether it is current there. What is not is unlinked again."""
    stamp_file = _stamp_of(stage, old, item, lock)
    try:
        stamp = read_stamp(stamp_file)
    except CorpusError:
        return False
    if stamp is None:
        return False
    linked = [_link(old.path / name, new.path / name) for name in stamp.outputs]
    linked.append(_link(stamp_file, new.path / relative(old, stamp_file)))
    if is_current(stage, new, config, lock, item):
        return True
    for path in linked:
        path.unlink(missing_ok=True)
    return False


def _stamp_of(stage: str, root: RunRoot, item: Item, lock: Lock) -> Path:
    source, key = item
    if stage == "survivors":
        return survivors_stamp_path(root, source)
    if stage == "tokens":
        return tokens_stamp_path(root, source, key)
    places = {"filtered": root.filtered(source, key), "digests": root.digests(source, key)}
    return stamp_path(places[stage] if stage in places else root.raw(source, lock.file(source, key).name))


def _link(source: Path, target: Path) -> Path:
    """A hard link, or a copy where the file system has none; nothing where there is no source."""
    if source.is_file() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    return target


def _copy(value: Any) -> Any:
    return {key: _copy(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _toml(sections: Mapping[str, Any], heading: str) -> str:
    """Sections, tables within them and plain values as TOML."""
    lines = [heading]

    def table(path: str, values: Mapping[str, Any]) -> None:
        plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
        lines.append(f"[{path}]")
        lines.extend(f"{key} = {_literal(value)}" for key, value in plain.items())
        lines.append("")
        for key, value in values.items():
            if isinstance(value, dict):
                table(f"{path}.{key}", value)

    for section, values in sections.items():
        table(section, values)
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(_literal(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_literal(entry)}" for key, entry in value.items()) + "}"
    return repr(value)
