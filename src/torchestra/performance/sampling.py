"""Samples of a time: their median, how far they spread, and how many are worth taking."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchestra.errors import InvalidArgumentError

_MIN_SAMPLES = 5


class Measured(NamedTuple):
    """A measured number.

    Attributes:
        value: the median of the samples, or another quantile.
        spread: half the distance between the quartiles, by the median.
    """

    value: float
    spread: float


def check_quantile(quantile: float) -> None:
    """Refuse a quantile that is not between 0 and 1.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not 0 < quantile < 1:
        raise InvalidArgumentError(f"the quantile must be between 0 and 1, got {quantile}")


def summarise(samples: Sequence[float], quantile: float = 0.5) -> Measured:
    """Return the quantile of samples, and how far they spread."""
    if len(samples) == 1:
        return Measured(samples[0], 0.0)
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    middle = cuts[49]
    value = middle if quantile == 0.5 else cuts[min(98, max(0, round(quantile * 100) - 1))]
    return Measured(value, (cuts[74] - cuts[24]) / 2 / middle if middle > 0 else 0.0)


def repeat(sample: Callable[[], float], seconds: float, most: int = 1000) -> list[float]:
    """Take samples, the first of which does not count, for about ``seconds``; at least five.

    A sample is a time in seconds, and its taking must not be much longer. Every rank may take another number
    of samples: only for what a rank times alone.
    """
    sample()
    samples: list[float] = []
    while len(samples) < _MIN_SAMPLES or (sum(samples) < seconds and len(samples) < most):
        samples.append(sample())
    return samples
