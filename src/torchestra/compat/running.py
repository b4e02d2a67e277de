"""Running a program renamed: as ``__main__``, and again in the processes that it starts.

A process that ``multiprocessing`` or :func:`torchestra.launch` starts anew imports the program's main module
by the name in that module's ``__spec__``. So that spec names our :mod:`torchestra.compat.child_main`, which
runs the program renamed in the new process. The environment tells which program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, cast

from torchestra.compat.importing import RenamingLoader, install
from torchestra.launcher.main_script import find_runnable, load_script
from torchestra.launcher.spec import Script

__all__ = ["run", "run_in_child"]

_VARIABLE = "TORCHESTRA_COMPAT_PROGRAM"


class _MainSpec(ModuleSpec):
    """Names the module to import in another process, but keeps the program's own package."""

    def __init__(self, package: str) -> None:
        super().__init__("torchestra.compat.child_main", None)
        self._package = package

    @property
    def parent(self) -> str:
        return self._package


def run(name: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run a file, or a module by its name, as ``__main__``; return at its end.

    Raises:
        SystemExit: there is no such module.
        BaseException: any exception that the program raises; an ImportError if it imports something that
            torchestra does not serve.
    """
    install()
    os.environ[_VARIABLE] = json.dumps([name if is_module else os.path.abspath(name), is_module])
    main, code = load_script(Script(name, tuple(arguments), is_module), RenamingLoader)
    main.__spec__ = _MainSpec(main.__package__ or "")
    exec(code, main.__dict__)


def run_in_child(namespace: dict[str, Any]) -> None:
    """Run the program in another process, in the namespace of the module that stands for ``__main__``."""
    install()
    name, is_module = json.loads(os.environ[_VARIABLE])
    if is_module:
        spec = find_runnable(name)
        path, package, loader = spec.origin, spec.parent or "", cast(Any, spec.loader)
    else:
        path, package, loader = name, "", RenamingLoader(namespace["__name__"], name)
    namespace.update(__file__=path, __cached__=None, __package__=package, __spec__=_MainSpec(package))
    exec(loader.get_code(loader.name), namespace)
