"""What a blocking check looks at: the files as they lie on the disk, held against what was promised.

Each function answers with sentences, one a problem; none is good news. Hashes cost one read of each
file, columns one read of its footer, the share kept one small read of each stamp of the source.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from model.errors import RQwen3Error
from model.files import sha256_file
from rqwen3_pipeline.corpus.documents import check_file
from rqwen3_pipeline.corpus.filtered_file import FILTERED_SCHEMA
from rqwen3_pipeline.corpus.filters import FLOOR_ROWS
from rqwen3_pipeline.corpus.funnel import require_source_kept, source_funnel
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.corpus.stamps import required_stamp, stamp_path
from rqwen3_pipeline.settings import RunRoot

Check = Callable[[RunRoot, CorpusConfig, Lock, str, Sequence[str]], list[str]]


def raw_hashes(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, keys: Sequence[str]) -> list[str]:
    """Raw files whose bytes are not those of the lock."""
    problems: list[str] = []
    for key in keys:
        file = lock.file(source, key)
        path = root.raw(source, file.name)
        seen = sha256_file(path) if path.is_file() else "no file"
        if seen != file.sha256:
            problems.append(f"{path}: SHA-256 is {seen[:12]}…, the lock says {file.sha256[:12]}…")
    return problems


def raw_columns(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, keys: Sequence[str]) -> list[str]:
    """Raw files that lack a column, or have other rows than the lock says."""
    problems: list[str] = []
    for key in keys:
        file = lock.file(source, key)
        path = root.raw(source, file.name)
        try:
            rows = check_file(path, source, config)
        except RQwen3Error as error:
            problems.append(str(error))
            continue
        if file.rows is not None and rows != file.rows:
            problems.append(f"{path}: {rows:,} rows, the lock says {file.rows:,}")
    return problems


def filtered_hashes(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, keys: Sequence[str]) -> list[str]:
    """Filtered files whose bytes are not those that were stamped."""
    problems: list[str] = []
    for key in keys:
        path = root.filtered(source, key)
        try:
            stamped = required_stamp(stamp_path(path), str(path)).outputs.values()
        except RQwen3Error as error:
            problems.append(str(error))
            continue
        seen = sha256_file(path) if path.is_file() else "no file"
        problems += [
            f"{path}: SHA-256 is {seen[:12]}…, its stamp says {facts['sha256'][:12]}…"
            for facts in stamped
            if seen != facts["sha256"]
        ]
    return problems


def filtered_columns(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, keys: Sequence[str]) -> list[str]:
    """Filtered files with other columns or other rows than the filter says it wrote."""
    problems: list[str] = []
    for key in keys:
        path = root.filtered(source, key)
        try:
            kept = required_stamp(stamp_path(path), str(path)).report["kept"]
            with pq.ParquetFile(path) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
        except (RQwen3Error, pa.ArrowException, OSError) as error:
            problems.append(f"{path}: {error}")
            continue
        if not schema.equals(FILTERED_SCHEMA):
            problems.append(f"{path}: columns {', '.join(schema.names)}, not {', '.join(FILTERED_SCHEMA.names)}")
        if rows != kept:
            problems.append(f"{path}: {rows:,} rows, its stamp says {kept:,}")
    return problems


def share_kept(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, keys: Sequence[str]) -> list[str]:
    """A source that keeps too little of its rows, over all its files that are filtered.

    A few rows of a source of which most is to come are no reason yet.
    """
    found = source_funnel(root, config, lock, source)
    if found.files_filtered < found.files and found.rows < FLOOR_ROWS:
        return []
    try:
        require_source_kept(root, config, lock, source)
    except RQwen3Error as error:
        return [str(error)]
    return []


CHECKS: dict[str, dict[str, Check]] = {
    "raw": {"hashes": raw_hashes, "columns": raw_columns},
    "filtered": {"hashes": filtered_hashes, "columns": filtered_columns, "share_kept": share_kept},
}
"""The blocking checks of a stage, by name."""
