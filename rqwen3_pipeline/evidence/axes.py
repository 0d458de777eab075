"""The arithmetic of a chart's axes: round ticks, their labels, and the map from data to pixels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def nice_step(span: float, wanted: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `wanted` parts."""
    rough = span / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * (1 - 1e-9)), 10 * power)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`, drawn between two pixel positions."""

    low: float
    """Value at `start_px`."""
    high: float
    """Value at `end_px`, above `low`."""
    start_px: float
    """Where the axis begins."""
    end_px: float
    """Where it ends."""
    step: float
    """Distance of the ticks."""

    @property
    def exponent(self) -> int:
        """Power of ten that is taken out of the labels of very small values."""
        largest = max(abs(self.low), abs(self.high))
        return math.floor(math.log10(largest)) if 0 < largest < 1e-2 else 0

    @property
    def multiplier(self) -> str:
        """What the labels must be multiplied with, for the axis' title; empty when nothing."""
        return f" (× 10{str(self.exponent).translate(_SUPERSCRIPTS)})" if self.exponent else ""

    def ticks(self) -> list[float]:
        """Multiples of the step within the axis."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [i * self.step for i in range(first, last + 1)]

    def label(self, tick: float) -> str:
        """A tick's text, with as many decimals as the step needs."""
        scale = 10.0**-self.exponent
        decimals = max(0, -math.floor(math.log10(self.step * scale) + 1e-9))
        return f"{tick * scale:,.{decimals}f}"

    def px(self, value: float) -> float:
        """Pixel position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start_px + share * (self.end_px - self.start_px)


def fit_axis(values: Iterable[float], *, start_px: float, end_px: float, wanted: int, from_zero: bool = False) -> Axis:
    """An axis over all finite values, its ends on ticks for y (low at `start_px`) as for x.

    Args:
        values: what must lie within; values that are not finite are passed over.
        start_px: pixel of the low end.
        end_px: pixel of the high end.
        wanted: about how many ticks.
        from_zero: begin at 0 even if all values lie above it.
    """
    inside = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(inside), max(inside)
    if from_zero:
        low = min(low, 0.0)
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-12):
        margin = abs(high) * 0.5 or 1.0
        low, high = low - (0.0 if from_zero and low == 0 else margin), high + margin
    step = nice_step(high - low, wanted)
    return Axis(
        low=math.floor(low / step + 1e-9) * step,
        high=math.ceil(high / step - 1e-9) * step,
        start_px=start_px,
        end_px=end_px,
        step=step,
    )
