"""The encoder: a tokenizer.json without its added tokens, as fast engine and as oracle.

Added tokens are stripped from a copy of the file before anything is encoded, so that markup in a
document (`<|endoftext|>`) stays text; how often it occurs can be counted. The engine is fastokens,
some 60 times as fast as its oracle, the library `tokenizers`; where fastokens does not take the file,
`tokenizers` does the work. It also encodes the few documents with a run of many kilobytes that no
space breaks: fastokens keeps such runs in its cache for good, and is no faster on them.

Loading Qwen3's file costs over a second of CPU a process, the oracle another third when it is
first asked; the engine's cache grows to some 270 MB and no further.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (fastokens ships no types)

import contextlib
import ctypes
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import fastokens
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from model.errors import CorpusError
from model.files import sha256_bytes

EOS_TOKEN = "<|endoftext|>"
RUN_CHARS = 8192
"""A run of twice as many characters without a break is always found, one of fewer than this never."""
_SPACE, _OTHER = re.compile(r"\s"), re.compile(r"\S")

Ids = npt.NDArray[np.uint32]
Ends = npt.NDArray[np.int64]


def has_long_run(text: str) -> bool:
    """Whether some window of `RUN_CHARS` characters is all white space, or has none."""
    return any(
        _SPACE.search(text, start, start + RUN_CHARS) is None or _OTHER.search(text, start, start + RUN_CHARS) is None
        for start in range(0, len(text) - RUN_CHARS + 1, RUN_CHARS)
    )


class Encoder:
    """A tokenizer.json without its added tokens, as engine and as oracle."""

    def __init__(self, data: bytes) -> None:
        """Read the file's content; engine and oracle are loaded when they are first asked.

        Raises:
            CorpusError: it is no tokenizer.json, or has no end-of-text token.
        """
        self.sha256: str = sha256_bytes(data)
        self.long_runs: int = 0
        """Documents so far that `tokenizers` encoded for their long runs."""
        try:
            content = json.loads(data)
            added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
            ids = {**content["model"]["vocab"], **added}
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"tokenizer.json is not readable ({type(error).__name__}: {error}). Pin or train it again."
            ) from error
        if EOS_TOKEN not in ids:
            raise CorpusError(f"tokenizer.json has no token {EOS_TOKEN}, which ends each document. Use another file.")
        self.markers: tuple[str, ...] = tuple(sorted(added, key=lambda marker: (-len(marker), marker)))
        """The added tokens, longest first: of two that begin alike the longer one is meant."""
        self.eos_id: int = ids[EOS_TOKEN]
        self.vocab_size: int = 1 + max(ids.values())
        content |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._content: dict[str, Any] = content

    @cached_property
    def _plain(self) -> str:
        """The file without its added tokens; the parsed content takes much more memory and goes."""
        content, self._content = self._content, {}
        merges: list[Any] = content["model"].get("merges") or []
        if all(isinstance(merge, list) and len(merge) == 2 and " " not in "".join(merge) for merge in merges):
            content["model"]["merges"] = [" ".join(merge) for merge in merges]  # the older form loads a quarter faster
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def _engine(self) -> Any:
        try:
            return fastokens.Tokenizer.from_json_str(self._plain)
        except Exception:  # whatever it can't take, the oracle can
            return None
        finally:
            _give_back_memory()

    @cached_property
    def _oracle(self) -> Tokenizer:
        try:
            return Tokenizer.from_str(self._plain)
        except Exception as error:  # the library raises nothing narrower
            raise CorpusError(f"tokenizer.json is not readable ({error}). Pin or train it again.") from error
        finally:
            _give_back_memory()

    def load(self) -> None:
        """Load engine and oracle now, and not when they are first asked."""
        _ = self._engine, self._oracle

    @property
    def engine(self) -> str:
        """Name of the library that encodes."""
        return "tokenizers" if self._engine is None else "fastokens"

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        """Encode texts, without end-of-text ids.

        Returns:
            The ids of all texts one after another, uint32; and where each text's ids end, int64,
            shape (texts,).

        Raises:
            CorpusError: an id is not below `vocab_size`, or is the end-of-text id.
        """
        slow = range(len(texts)) if self._engine is None else [i for i, text in enumerate(texts) if has_long_run(text)]
        if not slow:
            ids_, ends_ = self._encode_fast(texts)
        else:
            ids_, ends_ = self._encode_mixed(texts, frozenset(slow))
        if ids_.size and (int(ids_.max()) >= self.vocab_size or bool((ids_ == self.eos_id).any())):
            raise CorpusError(
                f"{self.engine}: a document got the id {int(ids_.max())}; ids must be below {self.vocab_size} and "
                f"not {self.eos_id}, the end of text. Report this with the tokenizer.json."
            )
        return ids_, ends_

    def _encode_fast(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        flat, offsets = self._engine.encode_batch_flat(texts)
        return np.frombuffer(flat, dtype="<u4"), np.frombuffer(offsets, dtype="<u8")[1:].astype(np.int64)

    def _encode_mixed(self, texts: Sequence[str], slow: frozenset[int]) -> tuple[Ids, Ends]:
        """Some texts by the oracle, one at a time, since it takes a hundred bytes a character; the others as usual."""
        fast = [text for i, text in enumerate(texts) if i not in slow]
        ids_, ends_ = self._encode_fast(fast) if fast else (np.empty(0, np.uint32), np.empty(0, np.int64))
        pieces: list[Ids] = []
        start, taken = 0, 0
        for i, text in enumerate(texts):
            if i in slow:
                pieces += self.encode_by_oracle([text])
            else:
                pieces.append(ids_[start : int(ends_[taken])])
                start, taken = int(ends_[taken]), taken + 1
        if self._engine is not None:
            self.long_runs += len(slow)
        return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def encode_by_oracle(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text by the reference library, uint32."""
        encodings = self._oracle.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def check_against_library(self, data: bytes) -> None:
        """Check what was read from the file against what `tokenizers` makes of all of it, added tokens included.

        Raises:
            CorpusError: they differ, or the library can't read the file.
        """
        try:
            whole = Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise CorpusError(f"tokenizer.json is not readable ({error}). Pin or train it again.") from error
        seen = whole.token_to_id(EOS_TOKEN), 1 + max(whole.get_vocab(with_added_tokens=True).values())
        if seen != (self.eos_id, self.vocab_size):
            raise CorpusError(
                f"tokenizer.json says {EOS_TOKEN} = {self.eos_id} and {self.vocab_size} ids, the library tokenizers "
                f"reads {seen[0]} and {seen[1]}. Use a file that the library wrote."
            )


def _give_back_memory() -> None:
    """Return freed memory to the system, where the C library can: loading leaves a hundred megabytes unused."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
