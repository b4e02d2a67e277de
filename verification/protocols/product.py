"""Copies of the product's modules, with other things in place of some that they use.

The source is the product's own. Copies, so that the product itself stays as it is for whoever else uses it in
this process, and so that a mutation can be applied to the text.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """A change of one module.

    Attributes:
        module: its name, below ``torchestra.engine`` or whole.
        old: a text that its source has exactly once.
        new: the text in its place.
        case: the case that finds it.
    """

    module: str
    old: str
    new: str
    case: str

    @property
    def subject(self) -> str:
        """What is changed, for reports."""
        return f"{self.module}: {' '.join(self.old.split())[:60]}"


def copies(
    names: Sequence[str], replaced: Mapping[str, Mapping[str, Any]], mutation: Mutation | None = None
) -> dict[str, ModuleType]:
    """Return copies of modules, by name.

    Args:
        names: below ``torchestra.engine`` or whole, those first that others import. Each copy refers to the
            copies before it.
        replaced: by module, other values of its global names.
    """
    made: dict[str, ModuleType] = {}
    for name in names:
        original = importlib.import_module(name if "torchestra." in name else f"torchestra.engine.{name}")
        assert original.__file__ is not None
        text = Path(original.__file__).read_text(encoding="utf-8")
        if mutation is not None and mutation.module == name:
            if text.count(mutation.old) != 1:
                raise ValueError(f"{name} has {text.count(mutation.old)} times {mutation.old!r}")
            text = text.replace(mutation.old, mutation.new)
        made[name] = _execute(original, text, made, replaced.get(name, {}))
    if mutation is not None and mutation.module not in made:
        raise ValueError(f"{mutation.module} is not part of this model")
    return made


def _execute(
    original: ModuleType, text: str, earlier: Mapping[str, ModuleType], replaced: Mapping[str, Any]
) -> ModuleType:
    module = ModuleType(original.__name__)
    module.__file__, module.__package__ = original.__file__, original.__package__
    kept = {each.__name__: sys.modules[each.__name__] for each in (*earlier.values(), module)}
    try:  # its imports and its dataclasses find the copies under the names of the originals
        sys.modules.update({each.__name__: each for each in (*earlier.values(), module)})
        exec(compile(text, str(original.__file__), "exec"), module.__dict__)
    finally:
        sys.modules.update(kept)
    for name, value in replaced.items():
        if name not in module.__dict__:
            raise ValueError(f"{original.__name__} has no {name}")
        module.__dict__[name] = value
    return module
