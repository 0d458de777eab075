"""How often the run has read the corpus: arithmetic on the manifest and the number of steps alone.

The order of training visits every window once per epoch (`model.order`), so after s steps of S
sequences each, s·S windows were read: the first n of them are n different ones, and only then does
any come a second time. Nothing has to be recorded for it while training.
"""

from typing import Any

from model.config import TrainConfig
from model.order import WindowLayout
from rqwen3_pipeline.evidence.readings import table_of, whole


def windows_read(manifest: dict[str, Any], training: TrainConfig, steps: int) -> dict[str, Any]:
    """What `steps` steps have read of the corpus, and what the whole run reads.

    Args:
        manifest: the manifest as JSON.
        training: for the lengths of windows and steps.
        steps: steps behind the kept model.

    Returns:
        `per_source` {name: {windows, tail_tokens}}; `windows`, how many there are; `so_far` and
        `whole_run`, each with `steps`, `reads`, `different` (windows read at least once), `unread`,
        `repeated_reads` and `epochs`.
    """
    shards = [table_of(shard) for shard in manifest.get("shards", [])]
    layout = WindowLayout(
        [str(shard.get("source")) for shard in shards],
        [whole(shard.get("tokens_used", shard.get("tokens"))) or 0 for shard in shards],
        training.seq_len,
    )
    return {
        "per_source": {
            name: {"windows": layout.windows[name], "tail_tokens": layout.tail[name]} for name in layout.sources
        },
        "windows": layout.total,
        "so_far": _reads(layout.total, steps, training.sequences_per_step),
        "whole_run": _reads(layout.total, training.max_steps, training.sequences_per_step),
    }


def _reads(windows: int, steps: int, sequences_per_step: int) -> dict[str, Any]:
    reads = steps * sequences_per_step
    return {
        "steps": steps,
        "reads": reads,
        "different": min(reads, windows),
        "unread": max(0, windows - reads),
        "repeated_reads": max(0, reads - windows),
        "epochs": reads / windows if windows else None,
    }
