"""Importing a program's own modules renamed (renaming.py), and no others.

Its own modules are source files outside Python's library and the directories of installed packages. So torch
and other packages import the real torch.distributed.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

import torchestra
from torchestra.compat.renaming import rename

__all__ = ["RenamingLoader", "install"]


class RenamingLoader(SourceFileLoader):
    """Loads a source file renamed. It leaves no ``.pyc``, which an import without this would use."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]
        """Return the code of a source file after the rename."""
        tree = ast.parse(data, path)
        return compile(rename(tree), path, "exec", dont_inherit=True)


class _Finder:
    """Precedes the other finders, and delegates to them."""

    def __init__(self) -> None:
        paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        packages = [str(Path(package.__file__ or "").parent) for package in (torch, torchestra)]
        self._foreign = [Path(path).resolve() for path in {*paths, *packages}]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that renames, or None if the module is not renamed."""
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if type(spec.loader) is SourceFileLoader and self._is_own(Path(spec.loader.path)):
                    spec.loader = RenamingLoader(spec.loader.name, spec.loader.path)
                return spec
        return None

    def _is_own(self, file: Path) -> bool:
        resolved = file.resolve()
        if {"site-packages", "dist-packages"} & {*file.parts, *resolved.parts}:
            return False
        return not any(folder in resolved.parents for folder in self._foreign)


def install() -> None:
    """Import the program's own modules renamed from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
