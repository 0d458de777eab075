"""The six data sets' files and columns, filled from passages of prose: rows for the demo corpus.

Names, order and types of the columns are those of the published sets, so that the demo goes through
the same code as the real corpus. What prose can't give (addresses, scores, votes, dates) comes from
the hash of the passage's address: equal installations give equal rows.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# (pyarrow ships no types)

import hashlib
import json
from typing import Any

import pyarrow as pa

from rqwen3_pipeline.corpus.docstring_html import blocks_of, to_html, with_dollars
from rqwen3_pipeline.corpus.installed_prose import Passage

_SITES = ("stackoverflow.com", "math.stackexchange.com", "stats.stackexchange.com", "datascience.stackexchange.com")
FILES: dict[str, tuple[str, ...]] = {
    "fineweb_edu": tuple(f"sample/100BT/{i:03d}_00000.parquet" for i in range(4)),
    "wikipedia": tuple(f"20231101.en/train-{i:05d}-of-00003.parquet" for i in range(3)),
    "openwebmath": tuple(f"data/train-{i:05d}-of-00003.parquet" for i in range(3)),
    "stackexchange": tuple(f"data/{site}/train-00000-of-00001.parquet" for site in _SITES),
    "pes2o": tuple(f"data/train-{i:05d}-of-00002.parquet" for i in range(2)),
    "textbooks": tuple(f"data/stanford/train-{i:05d}-of-00002.parquet" for i in range(2)),
}
"""Files of each source below its folder."""

_ANSWER = pa.struct(
    {
        "answer_id": pa.int64(),
        "author": pa.string(),
        "author_id": pa.int64(),
        "author_profile": pa.string(),
        "pm_score": pa.int64(),
        "selected": pa.bool_(),
        "text": pa.string(),
    }
)
_STRINGS = {name: pa.string() for name in ("text", "id", "dump", "url", "file_path", "language")}
SCHEMAS: dict[str, pa.Schema] = {
    "fineweb_edu": pa.schema(
        _STRINGS
        | {"language_score": pa.float64(), "token_count": pa.int64(), "score": pa.float64(), "int_score": pa.int64()}
    ),
    "wikipedia": pa.schema({name: pa.string() for name in ("id", "url", "title", "text")}),
    "openwebmath": pa.schema({name: pa.string() for name in ("url", "text", "date", "metadata")}),
    "stackexchange": pa.schema(
        {
            "qid": pa.int64(),
            "question": pa.string(),
            "answers": pa.list_(_ANSWER),
            "date": pa.string(),
            "metadata": pa.list_(pa.string()),
        }
    ),
    "pes2o": pa.schema({"content": pa.string()}),
    "textbooks": pa.schema(
        {"text_token_length": pa.int64()}
        | {name: pa.string() for name in ("prompt", "text", "seed_data", "format", "audience")}
    ),
}
"""Columns of each source."""

CHARS_PER_TOKEN = 4

_VOTES: tuple[tuple[tuple[int, bool], tuple[tuple[int, bool], ...]], ...] = (
    ((5, True), ((2, False),)),
    ((1, True), ((6, False), (0, False))),
    ((4, False), ((3, False),)),
    ((3, False), ((3, False), (2, False))),
    ((-1, False), ((-1, False),)),
    ((0, True), ((-1, False),)),
    ((4, True), ((2, True),)),
    ((-1, True), ((7, False), (0, False))),
    ((0, False), ((-1, False), (-1, False))),
)
"""(pm_score, selected) of the answer that the rule must choose, and of the others: chosen by the
asker with more or fewer votes, chosen by votes alone, a tie that the lowest answer id decides, all
negative, two chosen."""

_ASKED = (
    "I came across {name} while reading some code. What I found about it begins like this; how does it go on?",
    "Could somebody explain {name}? This is as far as I have got:",
    "What does {name} do, and when would I use it?",
    "My program calls {name} & I am not sure that the result is < what I expect. The notes say:",
)


def number(address: str, purpose: str, below: int) -> int:
    """A number in [0, below) that depends on nothing but the address and the purpose."""
    digest = hashlib.sha256(f"{purpose}\0{address}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % below


def fineweb_score(address: str) -> float:
    """A score in [2.0, 4.5], 84 % of them 3.0 or more; below that, rounding would often lift it to 3."""
    return 2.0 + 2.5 * (number(address, "score", 2**53) / 2**53) ** 0.5


def document_text(source: str, passage: Passage) -> str:
    """The text that a source shows of a passage."""
    return with_dollars(passage.text) if source in ("openwebmath", "stackexchange") else passage.text


def row(source: str, passage: Passage, others: list[Passage]) -> dict[str, Any]:
    """One row of `source`.

    Args:
        source: its name.
        passage: what the row is made from.
        others: short passages, for the answers that nobody chose; only StackExchange looks at them.
    """
    address = passage.address
    text = document_text(source, passage)
    if source == "fineweb_edu":
        return _fineweb_row(address, text)
    if source == "wikipedia":
        page = passage.name.replace(" ", "_")
        page_id = str(1_000_000 + number(address, "page", 10**8))
        return {
            "id": page_id,
            "url": f"https://wikipedia.example/wiki/{page}",
            "title": passage.name,
            "text": text,
        }
    if source == "openwebmath":
        found = {"found_math": "$" in text, "installed_file": address.partition("#")[0]}
        metadata = json.dumps({"extraction_info": found}, sort_keys=True)
        return {
            "url": f"https://math.example/{address}",
            "text": text,
            "date": _date(address, "-"),
            "metadata": metadata,
        }
    if source == "stackexchange":
        return _question_row(passage, text, others)
    if source == "pes2o":
        return {"content": text}
    return {
        "text_token_length": len(text) // CHARS_PER_TOKEN,
        "prompt": f"Explain {passage.name} to a student who has not met it before.",
        "text": text,
        "seed_data": "stanford",
        "format": "textbook_academic_tone",
        "audience": "college_students",
    }


def again(source: str, values: dict[str, Any], mark: str) -> dict[str, Any]:
    """The same document found a second time, elsewhere."""
    changed = dict(values)
    if "url" in changed:
        changed["url"] = f"{changed['url']}?{mark}"
    if source == "fineweb_edu":
        changed["id"] = f"<urn:uuid:{hashlib.sha256(changed['url'].encode()).hexdigest()[:32]}>"
        changed["score"], changed["int_score"] = 3.5, 4
    elif source == "wikipedia":
        changed["id"] = str(200_000_000 + number(changed["url"], "page", 10**8))
    elif source == "stackexchange":
        changed["qid"] = 200_000_000 + number(f"{changed['qid']}?{mark}", "question", 10**8)
    return changed


def _fineweb_row(address: str, text: str) -> dict[str, Any]:
    score = fineweb_score(address)
    return {
        "text": text,
        "id": f"<urn:uuid:{hashlib.sha256(address.encode()).hexdigest()[:32]}>",
        "dump": "CC-MAIN-" + ("2019-35", "2021-04", "2023-50", "2024-10")[number(address, "dump", 4)],
        "url": f"https://python.example/{address}",
        "file_path": f"installation/{address.partition('#')[0]}",
        "language": "en",
        "language_score": 0.65 + number(address, "language", 3500) / 10_000,
        "token_count": len(text) // CHARS_PER_TOKEN,
        "score": score,
        "int_score": int(score + 0.5),
    }


def _question_row(passage: Passage, text: str, others: list[Passage]) -> dict[str, Any]:
    address = passage.address
    blocks = blocks_of(text)
    half = sum(map(len, blocks)) / 2
    cut = 1
    while cut < len(blocks) - 1 and sum(map(len, blocks[:cut])) < half:
        cut += 1
    asked = _ASKED[number(address, "asked", len(_ASKED))].format(name=passage.name)
    texts = [to_html(blocks[cut:] or blocks)] + [to_html(blocks_of(with_dollars(other.text))) for other in others]
    chosen, unchosen = _VOTES[number(address, "votes", len(_VOTES))]
    first_id = 1_000_000 + 10 * number(address, "answer", 10**8)
    answers = [
        {
            "answer_id": first_id + i,
            "author": f"reader {number(address, f'author {i}', 500)}",
            "author_id": number(address, f"author {i}", 500),
            "author_profile": f"https://users.example/{number(address, f'author {i}', 500)}",
            "pm_score": votes,
            "selected": selected,
            "text": texts[i % len(texts)],
        }
        for i, (votes, selected) in enumerate((chosen, *unchosen))
    ]
    turn = number(address, "turn", len(answers))
    qid = 1_000_000 + number(address, "question", 10**8)
    return {
        "qid": qid,
        "question": to_html([asked, *blocks[:cut]]),
        "answers": answers[turn:] + answers[:turn],
        "date": _date(address, "/"),
        "metadata": [f"https://questions.example/q/{qid}", "https://questions.example", "https://users.example/1"],
    }


def _date(address: str, separator: str) -> str:
    day = number(address, "date", 12 * 12 * 28)
    return separator.join((str(2010 + day // 336), f"{day % 336 // 28 + 1:02d}", f"{day % 28 + 1:02d}"))
