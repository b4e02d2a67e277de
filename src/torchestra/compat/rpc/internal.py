"""As ``torch.distributed.rpc.internal``: how calls are pickled and named in profiles.

Calls themselves are pickled by ``torchestra.tensors.serialization``, not by this module; parts that an object
pickles by this module, within a call, belong to that call.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchestra.errors import RemoteNameError, RemoteReferenceError
from torchestra.rpc.messages import register_reducer
from torchestra.rpc.rref import RRef
from torchestra.tensors.serialization import reducer_in_progress

__all__ = [
    "PythonUDF",
    "RPCExecMode",
    "RemoteException",
    "_build_rpc_profiling_key",
    "_internal_rpc_pickler",
    "deserialize",
    "serialize",
]


class RPCExecMode(enum.Enum):
    """How a function is called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An error of a call."""

    msg: str
    exception_type: type[BaseException]


def _reduce_rref(rref: RRef) -> Any:
    reducer = reducer_in_progress(RRef)
    if reducer is not None:
        return reducer(rref)
    rref._check_not_deleted("fork an UserRRef")
    raise RemoteReferenceError(
        "an RRef can be serialized only within a call: it is passed to the worker that is called"
    )


class _Pickler(pickle.Pickler):
    """Puts tensors into a list."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], reducers: dict[type, Any]) -> None:
        super().__init__(file, 5)
        self._tensors = tensors
        self.dispatch_table = {**copyreg.dispatch_table, RRef: _reduce_rref, **reducers}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Takes tensors from a list."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[pid]
        return tensor


class _InternalRPCPickler:
    """Pickles objects, with their tensors in a separate list."""

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Set how objects of a class are pickled, in calls as well."""
        if obj_class not in self._class_reducer_dict:
            self._class_reducer_dict[obj_class] = reducer
            register_reducer(obj_class, reducer)

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """Return the pickle, and the tensors."""
        file, tensors = io.BytesIO(), list[torch.Tensor]()
        _Pickler(file, tensors, self._class_reducer_dict).dump(obj)
        return file.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Return the object; or an error, if the pickle contains a name unknown to this worker."""
        try:
            return _Unpickler(io.BytesIO(binary_data), tensor_table).load()
        except AttributeError as error:
            unknown = RemoteNameError(
                f"{error} Default RPC pickler does not serialize function code. Ensure that UDFs are defined"
                " on both caller and callee modules."
            )
            unknown.__cause__ = error
            return unknown


_internal_rpc_pickler = _InternalRPCPickler()
serialize = _internal_rpc_pickler.serialize
deserialize = _internal_rpc_pickler.deserialize


def _run_pickled(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Run, on the called worker, a call that another pickler than ours has pickled."""
    call = deserialize(binary_data, tensor_table)
    if isinstance(call, Exception):
        raise call
    return call.func(*(call.args or ()), **(call.kwargs or {}))


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call in profiles."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
