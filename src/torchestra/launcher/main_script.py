"""Run a file or a module as ``__main__``, as the interpreter itself would.

:func:`runpy.run_path` puts the old ``__main__`` back when the script returns, so threads and exit
handlers that outlive the script would find the wrong one. Here ``__main__`` is replaced for good.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from torchestra.launcher.spec import MainModule, Script


def run_script(script: Script) -> None:
    """Run ``script`` as ``__main__`` in this process; return when its last line has run.

    Raises:
        SystemExit: there is no such file or module, or none that can be run.
        BaseException: the script raised it.
    """
    main, code = load_script(script)
    exec(code, main.__dict__)


def load_script(
    script: Script, loader: type[SourceFileLoader] = SourceFileLoader
) -> tuple[types.ModuleType, types.CodeType]:
    """Make ``__main__`` the module that ``script`` is to run in, and compile it.

    Sets ``sys.argv``, and the first entry of ``sys.path`` (unless Python runs with a safe path) to the
    script's directory, or for a module to the working directory.

    Args:
        loader: compiles the script if it is a file; a module's own loader compiles a module.

    Raises:
        SystemExit: there is no such file or module, or none that can be run.
    """
    path = os.path.abspath(script.name)
    if script.is_module:
        _set_path(os.getcwd())
        return _load_spec(find_runnable(script.name), script.arguments)
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _set_path(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise SystemExit(f"torchestra run: {script.name!r} has no __main__.py to run")
        return _load_spec(spec, script.arguments, argv0=script.name)
    if not os.path.exists(path):
        raise SystemExit(f"torchestra run: there is no file {script.name!r}")
    _set_path(os.path.dirname(path))
    sys.argv[:] = [script.name, *script.arguments]
    reader = loader("__main__", path)
    main = _new_main("__main__", __file__=path, __cached__=None, __loader__=reader)
    return main, reader.source_to_code(reader.get_data(path), path)


def import_callers_main(main: MainModule) -> None:
    """Import the caller's ``__main__`` again as ``__mp_main__``, and let ``__main__`` name it too.

    The name is multiprocessing's: ``if __name__ == "__main__":`` is false, so the caller's program
    does not start again.
    """
    if main.name is not None:
        spec = importlib.util.find_spec(main.name)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {main.name!r}, the module that called launch()")
        module = _module_of(spec, "__mp_main__")
        code: types.CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    elif main.file is not None:
        module = _new_main("__mp_main__", __file__=main.file)
        with io.open_code(main.file) as file:
            code = compile(file.read(), main.file, "exec", dont_inherit=True)
    else:
        raise ImportError("the program that called launch() has no file that could be imported again")
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _set_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = directory


def find_runnable(name: str) -> ModuleSpec:
    """Find what ``python -m name`` would run: the module, or a package's ``__main__``.

    Raises:
        SystemExit: there is none.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"torchestra run: cannot find the module {name!r}: {error}") from error
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise SystemExit(f"torchestra run: no module named {name!r}")
    return spec


def _load_spec(
    spec: ModuleSpec, arguments: tuple[str, ...], argv0: str | None = None
) -> tuple[types.ModuleType, types.CodeType]:
    sys.argv[:] = [argv0 or spec.origin or spec.name, *arguments]
    main = _module_of(spec, "__main__")
    return main, spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def _module_of(spec: ModuleSpec, name: str) -> types.ModuleType:
    return _new_main(
        name,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _new_main(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=sys.modules["builtins"], **attributes)
    sys.modules["__main__"] = module
    return module
