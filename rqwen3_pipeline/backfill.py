"""Back-fills: many partitions of an asset, in runs of useful length, by the daemon that is up.

An *asset* back-fill is submitted: the daemon groups neighbouring partitions into one run each, as the
asset's back-fill policy says (`dagster job backfill` makes a run for every single one). Pieces that
are current cost a look, so that naming too many does no harm. Costs a few writes to the instance.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg
from dagster._core.execution.backfill import PartitionBackfill
from dagster._core.utils import make_new_backfill_id

from model.errors import ConfigError, EnvironmentProblem
from rqwen3_pipeline.assets.common import Pipeline
from rqwen3_pipeline.assets.sources import register_partitions
from rqwen3_pipeline.corpus.selection import select_files
from rqwen3_pipeline.corpus.stamps import tokenizer_stamp
from rqwen3_pipeline.definitions import by_file, defs
from rqwen3_pipeline.instance import existing_instance
from rqwen3_pipeline.settings import Settings

DAEMON = "BACKFILL"
SILENT_S = 120.0
"""A daemon beats every 30 s; one that is silent for so long is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """One back-fill that was handed to the daemon."""

    id: str
    """As the UI and the API name it."""
    source: str
    """The source whose files it makes."""
    assets: tuple[str, ...]
    """The assets, as `<name>/<source>`."""
    partitions: tuple[str, ...]
    """The files' keys."""


def asset_names() -> list[str]:
    """The assets that are made file by file, without their sources, in the order the data flows."""
    return list(dict.fromkeys(asset.key.path[0] for asset in by_file))


def submit(settings: Settings, names: Sequence[str], sources: Sequence[str], files: str | None) -> list[Submitted]:
    """Submit one asset back-fill a source.

    Args:
        settings: the settings in force.
        names: assets such as `filtered_documents`, or `filtered_documents/wikipedia`.
        sources: sources; none for all in use, or for those that the assets name.
        files: numbers of the files in the lock, as `3-7`; None for all.

    Raises:
        ConfigError: an asset, a source or a file is unknown, and the message lists the valid ones; or every asset
            names its source, and `sources` has others.
        CorpusError: nothing is locked yet, or token shards are wanted and there is no tokenizer.
        EnvironmentProblem: no daemon runs on this run root.
    """
    here = Pipeline(settings)
    _require_use(names, sources)
    wanted = _by_source(names, sources or list(here.corpus.sources))
    items = select_files(here.corpus, here.lock, list(wanted), files, "--partitions")
    if any("token_shards" in assets for assets in wanted.values()):
        tokenizer_stamp(here.root)
    instance = existing_instance(settings)
    require_daemon(instance)
    register_partitions(instance, here.lock)
    graph = defs.resolve_asset_graph()
    submitted: list[Submitted] = []
    for source, assets in wanted.items():
        keys = tuple(key for name, key in items if name == source)
        backfill = PartitionBackfill.from_asset_partitions(
            backfill_id=make_new_backfill_id(),
            asset_graph=graph,
            partition_names=keys,
            asset_selection=[dg.AssetKey([name, source]) for name in assets],
            backfill_timestamp=time.time(),
            tags={"rqwen3/backfill": source},
            dynamic_partitions_store=instance,
            all_partitions=False,
            title=f"{', '.join(assets)} of {source}",
            description=None,
            run_config=None,
        )
        instance.add_backfill(backfill)
        paths = tuple(f"{name}/{source}" for name in assets)
        submitted.append(Submitted(id=backfill.backfill_id, source=source, assets=paths, partitions=keys))
    return submitted


def _require_use(names: Sequence[str], sources: Sequence[str]) -> None:
    """Refuse sources that no asset would take, since each names its own."""
    own = {name.partition("/")[2] for name in names}
    if sources and "" not in own and own != set(sources):
        raise ConfigError(
            f"--source {' '.join(sources)}: {' '.join(names)} already says which source. Leave one of them out: "
            f"rqwen3 backfill {' '.join(dict.fromkeys(name.partition('/')[0] for name in names))} "
            f"{' '.join(f'--source {source}' for source in sources)}"
        )


def _by_source(names: Sequence[str], sources: Sequence[str]) -> dict[str, list[str]]:
    """The assets that are meant, by source, both in the order the data flows."""
    known = asset_names()
    meant: set[tuple[str, str]] = set()
    for text in names:
        name, _, source = text.partition("/")
        if name not in known:
            raise ConfigError(f"{text}: not an asset that is made file by file. Valid: {', '.join(known)}.")
        meant |= {(name, source)} if source else {(name, each) for each in sources}
    ordered = dict.fromkeys([*sources, *sorted(source for _, source in meant)])
    found = {source: [name for name in known if (name, source) in meant] for source in ordered}
    return {source: assets for source, assets in found.items() if assets}


def require_daemon(instance: dg.DagsterInstance) -> None:
    """Check that a daemon will take the back-fill up.

    Raises:
        EnvironmentProblem: none has given a sign of life lately; the message says how to start one.
    """
    beat = instance.get_daemon_heartbeats().get(DAEMON)
    silent_s = time.time() - beat.timestamp if beat is not None else float("inf")
    if silent_s > SILENT_S:
        last = "none ever ran here" if beat is None else f"its last sign of life is {silent_s:,.0f} s old"
        raise EnvironmentProblem(
            f"{instance.root_directory}: no Dagster daemon is running ({last}), so nobody would take the back-fill up. "
            "Start it in another terminal, with the same profile: rqwen3 up"
        )
