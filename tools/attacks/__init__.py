"""Attacks on a running torchestra, one module each, for ``tools/attack.py`` and for the tests.

A module here whose name has no leading underscore is an attack. It has

- a docstring, whose first line says what is tried;
- ``attack(seconds) -> Outcome``: set up a target, attack it for about so long, and see whether the job's own
  processes are served meanwhile. It cleans up after itself, and raises only if the attack itself is broken;
- perhaps ``hindrance() -> str``: why it cannot be run here (it needs root, say); empty if it can.

Parts that several share are in modules with an underscore.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol, cast


@dataclass
class Outcome:
    """Describe the outcome of an attack.

    Attributes:
        tried: how often what was tried.
        refused: how often what was turned away.
        broken: what got through, ended, or was not served as it should be: one line each. Empty if all held.
    """

    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is broken, unless it holds."""
        if not holds and otherwise not in self.broken:
            self.broken.append(otherwise)


class Attack(Protocol):
    """A module of this package."""

    __doc__: str

    def attack(self, seconds: float) -> Outcome:
        """See the package."""


def names() -> list[str]:
    """All attacks."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")


def load(name: str) -> Attack:
    """An attack by its name."""
    return cast(Attack, importlib.import_module(f"{__name__}.{name}"))


def hindrance(attack: Attack) -> str:
    """Return why an attack cannot be run here; empty if it can."""
    ask = getattr(attack, "hindrance", None)
    return str(ask()) if ask is not None else ""
