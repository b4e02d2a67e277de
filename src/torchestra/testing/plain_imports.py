"""Import torchestra under pytest as any program does: pytest would rewrite a plugin's whole package.

pytest treats every module of a distribution with a plugin as test code: it parses and compiles the module
anew, and caches the result separately. Without a bytecode cache every forked rank does so again, which takes
1.6 s. The rewriting is useful for test code only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = "torchestra"


class _PlainFinder(MetaPathFinder):
    """Finds the modules of torchestra where the interpreter itself would, ahead of pytest's finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        return PathFinder.find_spec(fullname, path, target)


def import_plainly() -> None:
    """Exempt modules of torchestra imported from now on from rewriting; a second call does nothing."""
    if not any(isinstance(finder, _PlainFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PlainFinder())
