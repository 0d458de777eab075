"""Cloze questions from held-out documents: which of these continues the text?

Each question takes one held-out document: a context of 60 to 100 words, the words that truly follow
it, and as many wrong continuations of similar length from other held-out documents of the same
source. No document is asked about twice, sources take turns, and everything is chosen by hashes of
the seed and the documents' digests, so that equal shards give equal questions. Costs decoding a few
documents per question, whatever the size of the held-out set.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (pyarrow and tokenizers ship no types)

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from model.errors import ConfigError, CorpusError
from model.files import sha256_bytes, write_bytes
from model.shard_format import Manifest, ShardEntry, docs_path, open_shard, read_manifest
from rqwen3_pipeline.settings import RunRoot

CONTEXT_WORDS = (60, 100)
CHOICE_WORDS = (8, 20)
NEEDED_WORDS = CONTEXT_WORDS[0] + CHOICE_WORDS[0]
_LENGTH_TOLERANCE_WORDS = 3
_READ_TOKENS = 4000
"""A question needs no more than the beginning of a long document."""

_WORD = re.compile(r"\S+")
_SENTENCE_END = re.compile(r"[.!?:][\"')\]]*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    source: str
    digest: str
    shard: ShardEntry
    start: int
    end: int


def write_cloze_items(root: RunRoot, path: Path, *, items: int, choices: int, seed: int) -> dict[str, Any]:
    """Write questions about the held-out documents as JSON lines.

    Each line holds `id`, `source`, `context`, `choices` (texts) and `gold` (index of the true one).

    Args:
        root: the run root, its corpus built.
        path: the file to write, whole or not at all.
        items: questions wanted.
        choices: continuations per question, the true one included.
        seed: chooses documents, places and positions.

    Returns:
        `items`, `requested`, `missing`, `choices`, `gold_positions`, `sha256` of the file, and by source
        `items`, `heldout_documents` and `reason` (why there is none or fewer than wanted, else null).

    Raises:
        ConfigError: fewer than one item or two choices are asked for.
        CorpusError: the held-out set is empty or damaged, or no question can be made of it.
    """
    if items < 1 or choices < 2:
        raise ConfigError(f"evaluation.items = {items} must be at least 1, evaluation.choices = {choices} at least 2")
    manifest = read_manifest(root.manifest)
    tokenizer = _tokenizer(root.tokenizer)
    by_source = _documents(manifest, seed)
    if not any(by_source.values()):
        raise CorpusError(
            f"{root.manifest}: no document is held out, so there is nothing to ask about. "
            "Lower data.heldout_one_in and build the corpus again: rqwen3 corpus build"
        )
    makers = {
        source: _questions(_texts(root.path, documents, tokenizer), choices, seed)
        for source, documents in by_source.items()
    }
    made = _in_turns(makers, items)
    if not made:
        raise CorpusError(
            f"{root.manifest}: no source has {choices} held-out documents of {NEEDED_WORDS} words or more, of "
            f"{sum(map(len, by_source.values()))} in all. Lower data.heldout_one_in, or evaluation.choices."
        )
    data = "".join(json.dumps(item, ensure_ascii=False, sort_keys=True) + "\n" for item in made).encode("utf-8")
    write_bytes(path, data)
    return _report(made, by_source, items, choices, sha256_bytes(data))


def _report(
    made: list[dict[str, Any]], by_source: dict[str, list[_Document]], items: int, choices: int, sha256: str
) -> dict[str, Any]:
    counts = Counter(item["source"] for item in made)
    missing = items - len(made)
    sources: dict[str, Any] = {}
    for source, documents in by_source.items():
        reason = None
        if not documents:
            reason = "no document is held out"
        elif missing:
            reason = (
                f"of its {len(documents)} held-out documents too few have {NEEDED_WORDS} words; "
                f"a question needs {choices} such documents"
            )
        sources[source] = {"items": counts[source], "heldout_documents": len(documents), "reason": reason}
    positions = Counter(item["gold"] for item in made)
    return {
        "items": len(made),
        "requested": items,
        "missing": missing,
        "choices": choices,
        "gold_positions": [positions[i] for i in range(choices)],
        "sources": sources,
        "sha256": sha256,
    }


def _tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise CorpusError(f"{path}: the tokenizer that made the shards is missing. Build it: rqwen3 corpus build")
    return Tokenizer.from_file(str(path))


def _documents(manifest: Manifest, seed: int) -> dict[str, list[_Document]]:
    """Held-out documents by source, each source's in the order of a seeded hash of the digests."""
    sources = dict.fromkeys(entry.source for entry in (*manifest.shards, *manifest.heldout))
    by_source: dict[str, list[_Document]] = {source: [] for source in sources}
    for entry in manifest.heldout:
        path = docs_path(manifest.root / entry.path)
        if not path.exists():
            raise CorpusError(f"{path}: the document table of a held-out shard is missing. Run: rqwen3 corpus build")
        table = pq.read_table(path, columns=["end", "digest"])
        start = 0
        for end, digest in zip(table["end"].to_pylist(), table["digest"].to_pylist(), strict=True):
            if not start < end <= entry.tokens:
                raise CorpusError(
                    f"{path}: a document ends at token {end:,}; it begins at {start:,} of a shard of {entry.tokens:,}. "
                    "Make the shard again: rqwen3 corpus build"
                )
            by_source[entry.source].append(
                _Document(source=entry.source, digest=digest.hex(), shard=entry, start=start, end=end)
            )
            start = end
    for documents in by_source.values():
        documents.sort(key=lambda document: (_hash(seed, document.digest, "document"), document.digest))
    return by_source


def _texts(root: Path, documents: list[_Document], tokenizer: Tokenizer) -> Iterator[tuple[_Document, str]]:
    """Decode documents one after another, the long ones only as far as a question can reach."""
    shards: dict[str, npt.NDArray[np.uint32]] = {}
    for document in documents:
        tokens_ = shards.setdefault(document.shard.path, open_shard(root, document.shard))
        end = min(document.end - 1, document.start + _READ_TOKENS)  # the last token is the end-of-text id
        text: str = tokenizer.decode(tokens_[document.start : end].tolist(), skip_special_tokens=False)
        if end < document.end - 1:
            text = text.rpartition(" ")[0]  # the last word may be cut
        yield document, text


def _questions(texts: Iterator[tuple[_Document, str]], choices: int, seed: int) -> Iterator[dict[str, Any]]:
    """Make questions from the documents of one source, each of which is asked about once.

    Wrong continuations come from the documents next in the hash's order, round and round.
    """
    usable: list[tuple[_Document, _Words]] = []
    waiting: list[int] = []
    for document, text in texts:
        words = _Words(text)
        if len(words) < NEEDED_WORDS:
            continue
        waiting.append(len(usable))
        usable.append((document, words))
        if len(usable) > choices + 1:  # one to spare, should two continuations be equal
            item = _question(usable, waiting.pop(0), choices, seed)
            if item is not None:
                yield item
    for index in waiting:
        item = _question(usable, index, choices, seed)
        if item is not None:
            yield item


def _question(usable: list[tuple[_Document, "_Words"]], index: int, choices: int, seed: int) -> dict[str, Any] | None:
    document, words = usable[index]
    cut = words.cut(_hash(seed, document.digest, "cut"), first=CONTEXT_WORDS[0])
    length = words.continuation_words(cut, _hash(seed, document.digest, "length"))
    texts = [words.choice(cut, length)]
    for other, other_words in (*usable[index + 1 :], *usable[:index]):
        if len(texts) == choices:
            break
        place = other_words.cut(_hash(seed, document.digest + other.digest, "wrong"), first=1, words_left=length)
        near = other_words.sentence_within(place, length - _LENGTH_TOLERANCE_WORDS, length + _LENGTH_TOLERANCE_WORDS)
        text = other_words.choice(place, near or length)
        if text not in texts:
            texts.append(text)
    if len(texts) < choices:
        return None
    gold = _hash(seed, document.digest, "gold") % choices
    wrong = texts[1:]
    return {
        "id": f"{document.source}/{document.digest[:16]}",
        "source": document.source,
        "context": words.context(cut),
        "choices": wrong[:gold] + texts[:1] + wrong[gold:],
        "gold": gold,
    }


class _Words:
    """A text with the places of its words and of its sentences' ends."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spans = [found.span() for found in _WORD.finditer(text)]
        self._ends = [_SENTENCE_END.search(text[start:end]) is not None for start, end in self._spans]

    def __len__(self) -> int:
        return len(self._spans)

    def cut(self, random: int, *, first: int, words_left: int = CHOICE_WORDS[0]) -> int:
        """Number of words before a cut, at least `first`; behind a sentence's end where there is one.

        A paragraph's border is avoided, since a choice is joined to its context by one space.
        """
        places = range(first, max(first, len(self) - words_left) + 1)
        inside = [place for place in places if place < len(self) and self._gap(place).count("\n") < 2] or [first]
        ends = [place for place in inside if self._ends[place - 1]]
        options = ends or inside
        return options[random % len(options)]

    def continuation_words(self, cut: int, random: int) -> int:
        """How many words from the cut on make the true continuation, to a sentence's end if one is near."""
        low, high = CHOICE_WORDS
        return self.sentence_within(cut, low, high) or min(len(self) - cut, low + random % (high - low + 1))

    def sentence_within(self, cut: int, low: int, high: int) -> int | None:
        """The fewest words of `low` to `high` from the cut on that end a sentence."""
        last = min(high, len(self) - cut)
        return next((n for n in range(max(low, CHOICE_WORDS[0]), last + 1) if self._ends[cut + n - 1]), None)

    def choice(self, cut: int, words: int) -> str:
        """So many words from the cut on, spaces and line breaks written as one space."""
        return " ".join(self._text[start:end] for start, end in self._spans[cut : cut + words])

    def context(self, cut: int) -> str:
        """The 60 to 100 words before the cut as they stand, from a sentence's beginning if one is near."""
        low, high = CONTEXT_WORDS
        starts = range(max(0, cut - high), cut - low + 1)
        first = next((place for place in starts if place == 0 or self._ends[place - 1]), starts[0])
        return self._text[self._spans[first][0] : self._spans[cut - 1][1]]

    def _gap(self, place: int) -> str:
        return self._text[self._spans[place - 1][1] : self._spans[place][0]]


def _in_turns(makers: dict[str, Iterator[dict[str, Any]]], items: int) -> list[dict[str, Any]]:
    """Take one question of each source in turn until there are enough or all are exhausted."""
    made: list[dict[str, Any]] = []
    open_makers = dict(makers)
    while open_makers and len(made) < items:
        for source in list(open_makers):
            item = next(open_makers[source], None)
            if item is None:
                del open_makers[source]
            elif len(made) < items:
                made.append(item)
    return made


def _hash(seed: int, name: str, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{name}".encode()).digest()[:8], "big")
