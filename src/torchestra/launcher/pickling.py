"""Serialization of functions, arguments, results and exceptions between launch() and its ranks."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, BinaryIO

from torchestra.errors import InvalidArgumentError
from torchestra.launcher.main_script import import_callers_main
from torchestra.launcher.spec import Call, MainModule


def dump_call(function: Callable[..., Any], arguments: tuple[Any, ...], *, elsewhere: bool = False) -> Call:
    """Pickle a call: by reference where ranks can import the function, else by value (cloudpickle).

    Args:
        function, arguments: the call that the ranks make.
        elsewhere: whether the ranks are on hosts that may lack the file of this process's ``__main__``, so
            that its definitions are pickled by value as well.

    Raises:
        InvalidArgumentError: neither works, for example because an argument holds a lock or a socket.
    """
    main = MainModule() if elsewhere else _callers_main()
    importable = main != MainModule() or getattr(function, "__module__", None) != "__main__"
    try:
        if importable and not elsewhere:
            return Call(pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL), main)
    except Exception as error:
        if not isinstance(function, FunctionType):
            raise _cannot_pickle(error) from error
    # For lambdas, nested functions, and definitions of a notebook or an interactive session.
    import cloudpickle

    try:
        return Call(cloudpickle.dumps((function, arguments)), main)
    except Exception as error:
        raise _cannot_pickle(error) from error


def _cannot_pickle(error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"launch: the function and its arguments must be picklable to reach the ranks, got {error!r}"
    )


def _callers_main() -> MainModule:
    """Return the origin of this process's ``__main__``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return MainModule(name=spec.name)
    file = getattr(main, "__file__", None)
    return MainModule(file=file)


def load_call(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and its arguments, in a rank."""
    loaded: tuple[Callable[..., Any], tuple[Any, ...]] = _InRank(io.BytesIO(call.payload), call.main).load()
    return loaded


def load_in_caller(file: BinaryIO) -> Any:
    """Return a result or an exception of a rank, in the process that called launch()."""
    return _InCaller(file).load()


def dump_result(result: Any, file: BinaryIO) -> None:
    """Write the function's result, in a rank.

    Raises:
        TypeError: the result, or something in it, cannot be pickled.
    """
    try:
        pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        if _dumped_by_value(result, file):
            return
        result_type = type(result)
        raise TypeError(
            f"the function returned a {result_type.__module__}.{result_type.__qualname__}, which cannot be"
            f" pickled ({error}); return tensors or plain data"
        ) from error


def dump_exception(error: BaseException) -> bytes | None:
    """Return the exception as bytes, or None if it does not survive pickling."""
    try:
        data = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
    except Exception:
        file = io.BytesIO()
        if not _dumped_by_value(error, file):
            return None
        data = file.getvalue()
    try:
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def _dumped_by_value(thing: object, file: BinaryIO) -> bool:
    """Pickle by value with cloudpickle, as classes that arrived by value need; return whether it worked."""
    import cloudpickle

    file.seek(0)
    file.truncate()
    try:
        cloudpickle.dump(thing, file)
    except Exception:
        return False
    return True


class _InRank(pickle.Unpickler):
    """Imports the caller's ``__main__`` if, and only if, something refers to it."""

    def __init__(self, file: BinaryIO, main: MainModule) -> None:
        super().__init__(file)
        self._main: MainModule | None = main

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main is not None:
            main, self._main = self._main, None
            import_callers_main(main)
        return super().find_class(module, name)


class _InCaller(pickle.Unpickler):
    """Maps the ranks' ``__mp_main__`` to this process's ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == "__mp_main__" else module, name)
