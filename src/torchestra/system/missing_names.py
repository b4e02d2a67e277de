"""Tell where a public name is that was looked for in the package itself: ``torchestra.Join``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any


def with_advice(package: str, file: str, load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` that calls ``load``, and says where a name is that is not there.

    Args:
        package: its name, for messages.
        file: its ``__init__.py``.
    """

    @functools.wraps(load)
    def get(name: str) -> Any:
        try:
            return load(name)
        except AttributeError:
            if (module := _module_with(Path(file).parent, name)) is None:
                raise
            module = f"{package}.{module}"
            message = f"module {package!r} has no attribute {name!r}; it is {module}.{name} (import {module})"
            # Without a name, or the interpreter would suggest the most similar one here as well.
            raise AttributeError(message, name=None, obj=None) from None

    return get


@functools.cache
def _module_with(folder: Path, name: str) -> str | None:
    """Return the subpackage that exports a name, the one nearest to the top; read as text, not imported."""
    if name.startswith("_"):
        return None
    for stub in sorted(folder.rglob("__init__.py*"), key=lambda path: (len(path.parts), path)):
        _, _, exported = stub.read_text("utf-8").partition("\n__all__ = ")
        if f'"{name}"' in exported and stub.suffix in (".py", ".pyi") and stub.parent != folder:
            return ".".join(stub.parent.relative_to(folder).parts)
    return None
