"""What a text is: UTF-8 without half surrogates, in NFC by the tokenizer library's tables.

The same on every machine, since the tables come with the library. Costs little where a text has
nothing that NFC may touch, which is most of them; memory stays bounded for long ones.
"""

import contextlib
import re

from tokenizers.normalizers import NFC

_PAIR = re.compile(rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]")
_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""Surrogates, each written as if it were a character."""
_REPLACEMENT = "\ufffd".encode()
_NFC = NFC()
_PART_BYTES = 250_000
_CUT = re.compile(
    rb"[\x00-\x7f]|[\xc3-\xcb\xd0\xd1][\x80-\xbf]|\xe3\x81[\x82-\xbf]|[\xe4-\xe9\xeb\xec][\x80-\xbf]{2}|\xf0\x9f[\x80-\xbf]{2}"
)
"""Characters before which a text may be cut for NFC, as they never combine with what stands before them: ASCII, Latin,
Cyrillic, kana, Chinese, Korean syllables, emoji."""
_UNSETTLED = re.compile(
    "[^\x00-\u02ff\u0370-\u0373\u0375-\u037d\u037f-\u0386\u0388-\u0482\u048a-\u052f\u0531-\u058f\u05d0-\u05f4"
    "\u0620-\u064a\u0660-\u066f\u0671-\u06d5\u0904-\u093b\u0960-\u0963\u0e01-\u0e37\u0e3f-\u0e47\u10a0-\u10ff"
    "\u1e00-\u1eff\u2002-\u20cf\u2100-\u2125\u2127-\u2129\u212c-\u2328\u232b-\u2adb\u2add-\u2bff\u3000-\u3029"
    "\u3030-\u3098\u309b-\u30ff\u3105-\u312f\u3131-\u318e\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua48c\uac00-\ud7a3"
    "\ue000-\uf8ff\ufe00-\ufe0f\ufeff\uff01-\uffee\ufffd\U0001d400-\U0001d7ff\U0001f000-\U0001faff"
    "\U00020000-\U0002a6df]+"
)
"""Runs of characters that NFC may change, move or join with what stands before them. Every other character stays as it
is unless one of these follows it: Unicode promises that for all versions, and a test holds it against the library."""
_ASCII = bytes(range(128))


def repair(value: str | bytes) -> tuple[str, bool]:
    """Make a text that UTF-8 can hold.

    A pair of surrogates, even one written as two, becomes its character; a half one becomes U+FFFD,
    as does what is no UTF-8.

    Returns:
        The text, and whether a U+FFFD was put in.
    """
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8"), False
        except UnicodeDecodeError:
            joined = _PAIR.sub(lambda match: _join(match[0].decode("utf-8", "surrogatepass")).encode(), value)
            text = _HALF.sub(_REPLACEMENT, joined).decode("utf-8", "replace")
            return text, text.count("\ufffd") != value.count(_REPLACEMENT)
    try:
        value.encode("utf-8")
        return value, False
    except UnicodeEncodeError:
        text = _join(value)
        return text, text.count("\ufffd") != value.count("\ufffd")


def _join(text: str) -> str:
    """Make one character of each pair of surrogates, and U+FFFD of each half one."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def nfc(text: str) -> str:
    """The text in NFC, by the tokenizer library's tables.

    Only what NFC may touch goes through the library, each run with the character before it: over whole
    texts it takes more time than all the rest of a filter, and 25 bytes of memory for each byte. Most
    texts have nothing of the kind, which is seen at once when their ASCII is taken out.
    """
    if text.isascii() or _settled(text.encode("utf-8")):
        return text
    parts: list[str] = []
    done = 0
    for run in _UNSETTLED.finditer(text):
        start = max(run.start() - 1, 0)
        parts += text[done:start], _NFC.normalize_str(text[start : run.end()])
        done = run.end()
    return "".join((*parts, text[done:])) if parts else text


def _settled(data: bytes) -> bool:
    """Whether NFC leaves a text as it is, by its UTF-8."""
    return _UNSETTLED.search(data.translate(None, _ASCII).decode("utf-8")) is None


def clean(raw: bytes | memoryview) -> tuple[bytes, int, bool]:
    """A text repaired and in NFC.

    A long one is made in parts, since the library may take some 25 bytes for each byte.

    Returns:
        The text as UTF-8, its code points, and whether a U+FFFD was put in.
    """
    if len(raw) <= _PART_BYTES:
        data = bytes(raw)
        if data.isascii():
            return data, len(data), False
        with contextlib.suppress(UnicodeDecodeError):
            chars = len(data.decode("utf-8"))
            if _settled(data):
                return data, chars, False
    made, chars, repaired, start = bytearray(), 0, False, 0
    while start < len(raw):
        end = len(raw)
        if end - start > _PART_BYTES:
            cut = _CUT.search(raw, start + _PART_BYTES)
            end = cut.start() if cut else end
        text, put_in = repair(bytes(raw[start:end]))
        text = nfc(text)
        made += text.encode()
        chars, repaired, start = chars + len(text), repaired or put_in, end
    return bytes(made), chars, repaired
