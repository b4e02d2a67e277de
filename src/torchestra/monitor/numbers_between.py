"""Numbers on a command line, which have a least and a largest value."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable


def number_between(least: float, most: float, unit: str = "") -> Callable[[str], float]:
    """Return a function that reads such a number, for argparse's ``type=``."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            number = float(text)
            if least <= number <= most:  # NaN is not
                return number
        raise argparse.ArgumentTypeError(f"must be between {least:g} and {most:g}{unit}, got {text}")

    return read


def seconds_between(least: float, most: float) -> Callable[[str], float]:
    """Return a function that reads a number of seconds, for argparse's ``type=``."""
    return number_between(least, most, " seconds")
