"""Texts on which tokenizers disagree: every code point in several contexts, long runs, markup, broken text."""

import random
import unicodedata
from collections.abc import Iterator

MARKUP = ["<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<|endoftext", "<|<|endoftext|>|>", "<tool_call>\n"]
SCRIPTS = [
    *("plain words", "Größe", "naïve café", "кошка", "γάτα", "חתול", "قطة"),
    *("बिल्ली", "แมว", "고양이", "猫は", "数学", "𝔘𝔫𝔦"),
]
AWKWARD = [
    *"aZß09²½ \t\n\r\x0b\x0c\x00\x1f\x7f\x85\xa0\xad_'’-/\\<>|&#;",
    *("'s", "'LL", "'re", "\r\n", "\n\n", "  ", "\u2003", "\u200b", "\u200d", "\u2028", "\u3000", "\ufeff", "\ufffd"),
    *("\u0301", "\u0327", "\u0345", "\u05b0", "\u093c", "\u3099", "\u1161", "\u11a8"),
    *("\uac00", "\u1100", "\u212b", "\u2126"),
    *("é", "ſ", "\u212a", "İ", "ŉ", "数", "が", "👍", "🏽", "👩\u200d🔬", "🇩🇪", "\ue000", "\U0010ffff", "\U000e0100"),
]
RUNS = [
    *("a", "Z", "ab", "1", " ", "\n", "\t ", " \n", "\r\n", "-", "=", "!?", "'s", "é"),
    *("\u0301", "e\u0301", "数", "👍", "\u200d", "\x00"),
]


def code_points(step: int = 1, first: int = 0) -> Iterator[str]:
    """Every `step`-th assigned code point, each alone and between letters, digits, spaces, marks and itself."""
    assigned = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    chosen = assigned[first::step]
    for start in range(0, len(chosen), 128):
        yield "".join(f"{c} a{c}b 1{c}\n{c}{c}e{c}\u0301" for c in chosen[start : start + 128])


def runs(length: int) -> Iterator[str]:
    """One thing again and again, up to `length` characters, bare and inside a sentence."""
    for unit in RUNS:
        run = unit * (length // len(unit))
        yield run
        yield f"It says {run} here.\n"
    draw = random.Random(length)
    yield "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length))
    yield "".join(draw.choices("ACGT", k=length))
    yield "".join(draw.choices("!#$%&*+/=?@^~", k=length))


def mixtures(count: int, seed: int = 1) -> Iterator[str]:
    """Random sequences of awkward pieces, scripts and markup."""
    draw = random.Random(seed)
    pieces = AWKWARD * 3 + SCRIPTS * 2 + MARKUP
    for _ in range(count):
        yield "".join(draw.choices(pieces, k=draw.randint(1, 120)))
