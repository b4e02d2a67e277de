"""Import torchestra under pytest as any program does: pytest would rewrite a plugin's whole package.

pytest takes whatever a distribution with a plugin holds for test code: it parses and compiles every module of
it anew, and keeps the results apart. Without a cache of bytecode every rank that is forked does so again, for
1.6 s. Of pytest's rewriting only test code has any use.
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
    """Have the modules of torchestra that are imported from now on left as they are; twice does no harm."""
    if not any(isinstance(finder, _PlainFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PlainFinder())
