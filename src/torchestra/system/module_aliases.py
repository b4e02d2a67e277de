"""Modules that only name things of other modules, made from a table when they are first imported.

So a module can be imported by a second path without a file of its own: torch.distributed's paths in
:mod:`torchestra.compat`, and the paths of modules that have moved.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

AliasTable = Mapping[str, Mapping[str, str]]
"""The names of each module by the modules that they come from.

The names are in one text: ``"a b=c *"`` is a, c under the name b, and all of the module's ``__all__``.
A module below another makes that a package; one without names is only a package.
"""


class AliasFinder:
    """Finds and makes the modules of a table; an entry of ``sys.meta_path``.

    It has no base class because ``importlib.abc`` takes 20 ms to import.
    """

    def __init__(self, table: AliasTable) -> None:
        self._table = table

    def install(self) -> None:
        """Make ``import`` find the modules from now on, before folders that an older version left behind."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table, else None."""
        if fullname not in self._table:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self._table)
        origin = "torchestra's table of aliases"
        return ModuleSpec(fullname, self, origin=origin, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        sources = self._table[module.__name__]
        vars(module)["__getattr__"] = partial(self._import_submodule, module.__name__)
        module.__doc__ = f"Names of {' and '.join(sources)}." if sources else "Holds nothing but modules."
        named: dict[str, object] = {}
        for source, text in sources.items():
            origin = importlib.import_module(source)
            for entry in text.split():
                alias, _, name = entry.partition("=")
                for each in origin.__all__ if entry == "*" else [alias]:
                    named[each] = getattr(origin, name or each)
        vars(module).update(named, __all__=sorted(named))

    def _import_submodule(self, package: str, name: str) -> ModuleType:
        """Return a module of a package, imported when it is asked for as an attribute."""
        path = f"{package}.{name}"
        if path in self._table:
            return importlib.import_module(path)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
