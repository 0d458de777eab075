"""Numbers as a person reads them."""

from typing import Any

NOTHING = "pending"


def magnitude(value: float) -> str:
    """Three significant figures with million, billion or trillion: 751632384 is `752 million`."""
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if value >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + word
    return f"{value:,.0f}"


def quantity(value: Any, decimals: int | None = None, unit: str = "") -> str:
    """A figure with thousands separated; text stays, nothing is `pending`.

    Args:
        value: what evidence.json holds.
        decimals: digits behind the point; None prints integers as they are and floats with four.
        unit: put behind a number.
    """
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        places = decimals if decimals is not None else (0 if isinstance(value, int) else 4)
        return f"{value:,.{places}f}{unit}"
    return str(value)


def dash(value: Any, decimals: int | None = None) -> str:
    """The same as `quantity`, but a dash for what will never come; numbers of steps, exits and jobs."""
    return "–" if value is None else quantity(value, decimals)


def between(least: int | None, most: int | None) -> str:
    """A number that is known to lie between two, the upper of which may be unknown."""
    if least is None or least == most:
        return quantity(least)
    return f"at least {least:,}" if most is None else f"{least:,} to {most:,}"


def percent(value: Any, decimals: int = 1) -> str:
    """A share as per cent."""
    return f"{100 * value:.{decimals}f} %" if isinstance(value, int | float) else quantity(value)


def size(value: Any) -> str:
    """Bytes, in the unit that fits, by powers of 1,024."""
    if not isinstance(value, int | float):
        return quantity(value)
    scaled = float(value)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if scaled < 1024:
            return f"{scaled:,.0f} bytes" if unit == "bytes" else f"{scaled:,.1f} {unit}"
        scaled /= 1024
    return f"{scaled:,.1f} TiB"


def duration(value: Any) -> str:
    """Seconds as days, hours, minutes and seconds, the two largest of them."""
    if not isinstance(value, int | float):
        return quantity(value)
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            return f"{whole // large} {names[0]} {whole % large // small} {names[1]}"
    return f"{whole} s"
