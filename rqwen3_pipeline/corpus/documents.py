"""Documents out of raw parquet files: columns by name, text repaired and in NFC, one at a time.

Columns may be string, large string, binary or dictionary, and may be null anywhere, whole files
included. A text is NFC by the tokenizer library's tables, the same on every machine; half
surrogates and bytes that are no UTF-8 become U+FFFD. Reads batches through a buffered stream, none of
which can hold more than `BATCH_BYTES` unless it is a single row, so that memory follows the longest
row and not the file, its row groups, or how long rows lie together; costs one decoding of the columns.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (pyarrow ships no types)

import contextlib
import itertools
import math
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model.errors import SourceError
from rqwen3_pipeline.corpus.sources import COLUMNS, CorpusConfig, required_columns
from rqwen3_pipeline.corpus.stackexchange import LONGEST_BODY_BYTES, Answer, compose
from rqwen3_pipeline.corpus.text import clean, nfc, repair

BATCH_ROWS, BATCH_BYTES = 128, 64 * 1024 * 1024
BUFFER_BYTES = 1024 * 1024
ANSWER_FIELDS = ("answer_id", "pm_score", "selected", "text")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_NO_NUMBER = frozenset(("", "nan", "none", "null"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One row of a raw file."""

    row: int
    """Its row in the raw file, from 0."""
    id: str
    """The source's id, or `<file>#<row>`."""
    url: str
    """Its address, or empty."""
    data: bytes
    """Its text, as UTF-8: in NFC, without half surrogates. As a `str` it may take four times the memory."""
    chars: int
    """Code points of the text."""
    title: str = ""
    """Wikipedia's title of the page."""
    score: float | None = None
    """FineWeb-Edu's score."""
    defect: str = ""
    """Why there is no text to judge: `null_text`, `no_answer`, `blank`, `too_long`; else empty."""
    repaired: bool = False
    """Whether something in the text became U+FFFD."""

    @property
    def text(self) -> str:
        """The text, decoded anew each time."""
        return self.data.decode()


def check_file(path: Path, source: str, config: CorpusConfig) -> int:
    """Check a raw file's footer and columns.

    Returns:
        Its number of rows.

    Raises:
        SourceError: it is no whole parquet file, or lacks a column; the message names both.
    """
    with _opened(path) as file:
        _columns(path, file.schema_arrow, source, config)
        if source == "stackexchange":
            _answer_fields(path, file.schema_arrow.field("answers").type)
        return int(file.metadata.num_rows)


def read_documents(path: Path, source: str, config: CorpusConfig) -> Iterator[Document]:
    """Read a raw file's rows, in order.

    Raises:
        SourceError: the file lacks a column, has one of an unusable type, or is damaged anywhere; the
            message names the file and, where it can, the column and the rows.
    """
    score_column = config.sources[source].score_column
    with _opened(path) as file:
        first_row = 0
        for batch in read_batches(path, file, _columns(path, file.schema_arrow, source, config)):
            columns = {name: batch.column(name) for name in batch.schema.names}
            if source == "stackexchange":
                yield from _questions(path, columns, first_row)
            else:
                yield from _texts(path, columns, source, score_column, first_row)
            first_row += batch.num_rows
            del batch, columns  # before the next one is decoded: a batch may be large


@contextlib.contextmanager
def _opened(path: Path) -> Generator[Any, None, None]:
    try:
        file = pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
    except FileNotFoundError as error:
        raise SourceError(f"{path}: no such file. Fetch it: rqwen3 sources fetch") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{path}: not a whole parquet file ({path.stat().st_size:,} bytes; {_first_line(error)}). "
            "Fetch it again, or remove it, and lock the sources again."
        ) from error
    with file:
        yield file


def read_batches(path: Path, file: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Read a file's rows in order, in batches that fit into memory.

    Raises:
        SourceError: the file is damaged; the message says after which row.
    """
    row = 0
    batches = _decoded(file, columns)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SourceError(
                f"{path}: damaged after row {row:,} of {file.metadata.num_rows:,}, columns {', '.join(columns)} "
                f"({_first_line(error)}). Fetch it again and lock the sources again."
            ) from error
        if batch is None:
            break
        row += batch.num_rows
        yield batch
        del batch
    if row != file.metadata.num_rows:
        raise SourceError(f"{path}: {row:,} rows read, the footer says {file.metadata.num_rows:,}. Fetch it again.")


def _decoded(file: Any, columns: Sequence[str]) -> Iterator[Any]:
    for number in range(file.metadata.num_row_groups):
        rows = _batch_rows(file.metadata.row_group(number), columns)
        yield from file.iter_batches(batch_size=rows, row_groups=[number], columns=list(columns), use_threads=False)


def _batch_rows(group: Any, columns: Sequence[str]) -> int:
    """Rows to decode at once: no value is longer than its row group, so many times that is the most they can take."""
    chunks = (group.column(i) for i in range(group.num_columns))
    size_bytes = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(size_bytes, 1)))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _columns(path: Path, schema: Any, source: str, config: CorpusConfig) -> list[str]:
    """The columns to read of a file, each of which it has once."""
    required, present = required_columns(config, source), list(schema.names)
    missing = [name for name in required if name not in present]
    if missing:
        raise SourceError(
            f"{path}: lacks the column {missing[0]!r}; it has {', '.join(present)}. "
            "It is probably another data set's file; replace it and lock the sources again."
        )
    wanted = sorted({*required, COLUMNS[source].id, COLUMNS[source].url} & set(present))
    twice = [name for name in wanted if present.count(name) > 1]
    if twice:
        raise SourceError(
            f"{path}: has {present.count(twice[0])} columns {twice[0]!r}. Replace it and lock the sources again."
        )
    return wanted


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in (*kinds, pa.types.is_string_view, pa.types.is_binary_view))


def _binary(path: Path, name: str, array: Any) -> Any:
    """A column as large binary, whatever kind of text it is; whole numbers are written out (ids)."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_integer(array.type):
        array = array.cast(pa.string())
    if not _is_text(array.type) and not pa.types.is_null(array.type):
        raise SourceError(f"{path}: column {name!r} is of type {array.type}, not text. Replace the file.")
    return array.cast(pa.large_binary())


def views(array: Any) -> list[memoryview | None]:
    """The bytes of each value of a string or binary column, where Arrow has them: nothing is decoded or copied."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    edge_ = np.frombuffer(offsets or b"", dtype=np.int64 if large else np.int32)
    edges = edge_[array.offset : array.offset + len(array) + 1].tolist()
    view = memoryview(data or b"")
    found: list[memoryview | None] = [view[start:end] for start, end in itertools.pairwise(edges)]
    if array.null_count:
        for i in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            found[i] = None
    return found


def _strings(path: Path, name: str, array: Any) -> list[bytes | None]:
    """A column of short texts."""
    return _binary(path, name, array).to_pylist()


def _repaired(path: Path, name: str, array: Any) -> list[str | None]:
    """A column of short texts, repaired."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        with contextlib.suppress(UnicodeDecodeError):
            return array.to_pylist()
    return [None if raw is None else repair(raw)[0] for raw in _strings(path, name, array)]


def _words(path: Path, name: str, array: Any) -> list[str]:
    """A column of short texts, repaired; a null is empty."""
    return [value or "" for value in _repaired(path, name, array)]


def _values(path: Path, name: str, array: Any) -> list[Any]:
    """A column of numbers, booleans or short texts, which are repaired."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    plain = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
    if any(is_kind(array.type) for is_kind in plain):
        return array.to_pylist()
    return _repaired(path, name, array)


def _addresses(path: Path, name: str, array: Any) -> list[str]:
    """A column of addresses, or of lists that begin with one, repaired; what is neither is empty."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(is_kind(array.type) for is_kind in lists):
        array = pc.list_slice(array, 0, 1, return_fixed_size_list=True).values  # null where a list has no element
    return _words(path, name, array) if _is_text(array.type) else [""] * len(array)


def _numbers(path: Path, name: str, array: Any) -> list[float | None]:
    """A column of scores, whatever its type.

    Floats, whole numbers and decimals count as they are. Text counts as the number that it spells, with
    or without spaces around it; blank text, `nan`, `none` and `null` are no score, as are null and what
    is not finite. A boolean or any other word is refused.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    numeric = (pa.types.is_floating, pa.types.is_integer, pa.types.is_decimal, pa.types.is_null)
    if any(is_kind(kind) for is_kind in numeric):
        values: list[float | None] = array.cast(pa.float64(), safe=False).to_pylist()
    elif pa.types.is_boolean(kind):
        raise SourceError(f"{path}: column {name!r} is of type {kind}, not a number. Replace the file.")
    else:
        values = [_spelled(path, name, raw) for raw in _strings(path, name, array)]
    return [None if value is None or not math.isfinite(value) else value for value in values]


def _spelled(path: Path, name: str, raw: bytes | None) -> float | None:
    word = "" if raw is None else repair(raw)[0].strip()
    if word.lower() in _NO_NUMBER:
        return None
    if _NUMBER.fullmatch(word) is None:
        raise SourceError(
            f"{path}: column {name!r} is of type string, not a number, and one of its values, {word[:40]!r}, spells "
            "none. Replace the file."
        )
    return float(word)


def _texts(
    path: Path, columns: dict[str, Any], source: str, score_column: str | None, first_row: int
) -> Iterator[Document]:
    names = COLUMNS[source]
    column = columns[names.text]
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    texts = views(column if is_text else _binary(path, names.text, column))
    nothing = [""] * len(texts)
    ids, urls, titles = (
        _words(path, name, columns[name]) if name in columns else nothing for name in (names.id, names.url, "title")
    )
    scores = _numbers(path, score_column, columns[score_column]) if score_column else [None] * len(texts)
    for i, (raw, id_, url, title, score) in enumerate(zip(texts, ids, urls, titles, scores, strict=True)):
        data, chars, repaired = (b"", 0, False) if raw is None else clean(raw)
        yield Document(
            row=first_row + i,
            id=id_ or f"{path.name}#{first_row + i}",
            url=url,
            data=data,
            chars=chars,
            title=title,
            score=score,
            defect="null_text" if raw is None else "",
            repaired=repaired,
        )


def _answer_fields(path: Path, kind: Any) -> None:
    if pa.types.is_null(kind):
        return
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise SourceError(f"{path}: column 'answers' is of type {kind}, not a list of structs. Replace the file.")
    present = [] if pa.types.is_null(kind.value_type) else [field.name for field in kind.value_type]
    missing = [name for name in ANSWER_FIELDS if name not in present]
    if missing and present:
        raise SourceError(
            f"{path}: column 'answers' lacks the field {missing[0]!r}; it has {', '.join(present)}. Replace the file."
        )


def _answers(path: Path, array: Any) -> list[list[Answer]]:
    """The answers of each row of a batch; null lists, null elements and bodies that are no post's are left out."""
    _answer_fields(path, array.type)
    if pa.types.is_null(array.type) or pa.types.is_null(array.type.value_type):
        return [[] for _ in range(len(array))]
    rows = pc.list_parent_indices(array).to_pylist()
    values = pc.list_flatten(array)
    ids, scores, chosen, texts = (pc.struct_field(values, name) for name in ANSWER_FIELDS)
    found: list[list[Answer]] = [[] for _ in range(len(array))]
    flat = zip(
        rows,
        _values(path, "answers.answer_id", ids),
        _numbers(path, "answers.pm_score", scores),
        _values(path, "answers.selected", chosen),
        _strings(path, "answers.text", texts),
        strict=True,
    )
    for row, id_, score, selected, raw in flat:
        if raw is not None and len(raw) <= LONGEST_BODY_BYTES:
            text, repaired = repair(raw)
            found[row].append(Answer(id=id_, score=score, selected=selected, html=text, repaired=repaired))
    return found


def _questions(path: Path, columns: dict[str, Any], first_row: int) -> Iterator[Document]:
    names = COLUMNS["stackexchange"]
    questions = _strings(path, names.text, columns[names.text])
    answers = _answers(path, columns["answers"])
    nothing = [""] * len(questions)
    ids = _words(path, names.id, columns[names.id]) if names.id in columns else nothing
    urls = _addresses(path, names.url, columns[names.url]) if names.url in columns else nothing
    for i, (raw, id_, url, candidates) in enumerate(zip(questions, ids, urls, answers, strict=True)):
        too_long = raw is not None and len(raw) > LONGEST_BODY_BYTES
        question, repaired = ("", False) if raw is None or too_long else repair(raw)
        text, answer = compose(question, candidates)
        defect = "null_text" if raw is None else "" if text else "no_answer" if answer is None else "blank"
        text = nfc(text)
        yield Document(
            row=first_row + i,
            id=id_ or f"{path.name}#{first_row + i}",
            url=url,
            data=text.encode(),
            chars=len(text),
            defect="too_long" if too_long else defect,
            repaired=repaired or (answer is not None and answer.repaired),
        )
