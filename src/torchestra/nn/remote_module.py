""":class:`RemoteModule`: a module on another worker, called like a local one."""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from torchestra.errors import InvalidArgumentError, RemoteReferenceError
from torchestra.nn.remote_device import RemoteDevice
from torchestra.nn.remote_script import NOT_PICKLED, TargetFuture, scripted_methods, target_future
from torchestra.rpc import RRef, get_worker_info, remote, rpc_async, rpc_sync
from torchestra.rpc.current import agent_or_none
from torchestra.tensors.serialization import reducer_in_progress

M = TypeVar("M", bound="RemoteModule")

PICKLED_ATTRIBUTES = ("on", "device", "is_device_map_set", "is_scriptable", "module_rref")
"""The attributes that are sent with a RemoteModule."""

_METHODS = ("forward_async", "forward")
_log = logging.getLogger(__name__)


class RemoteModule(torch.nn.Module):
    """A module that is made, and whose ``forward`` is run, on another worker.

    Within a distributed autograd context its gradients are computed there. It may be passed to other workers
    in calls, like a reference: all use the same module. Its parameters are :meth:`remote_parameters`. For
    everything else of the module, such as its hooks and state, use ``module_rref``.

    Args:
        remote_device: ``"<worker>/<device>"`` or ``"rank:<rank>/<device>"``. Without a device: the worker's
            CPU. Inputs are moved to a device that is not the CPU, and results back from it.
        module_cls: makes the module; anything callable that can be sent.
        args, kwargs: for it.
        _module_interface_cls: a TorchScript interface whose ``forward`` the module's is. Then the module is
            scripted there, and this one can be scripted too, by ``torch.jit.script``: scripts can call it.

    Attributes:
        on: the worker's name or rank.
        device: the device there.
        is_scriptable: whether it has an interface.
        module_rref: refers to the module.

    Raises:
        RpcError: ``init_rpc`` has not been called, or there is no such worker.
        InvalidArgumentError: ``remote_device`` cannot be read.
        ValueError: from the first use of the module: ``module_cls`` has not returned a module.
    """

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        self._choose_worker(remote_device)
        scripted = _module_interface_cls is not None
        to_make = (module_cls, tuple(args or ()), kwargs or {}, self.device, scripted)
        methods = scripted_methods(_module_interface_cls, _begin) if scripted else {}
        self.module_rref = remote(self.on, _make_module, to_make)
        self._take_methods(methods)

    def _choose_worker(self, remote_device: str | torch.device) -> None:
        if agent_or_none() is None:
            raise RemoteReferenceError("RemoteModule only works in RPC: call init_rpc first")
        parsed = RemoteDevice.parse(remote_device)
        self.on: str | int = get_worker_info().name
        if parsed.worker is not None:
            self.on = parsed.worker
        elif parsed.rank is not None:
            self.on = parsed.rank
        self.device = str(parsed.device)
        self.is_device_map_set = False
        self.is_scriptable = False

    def _take_methods(self, methods: dict[str, Callable[..., Any]]) -> None:
        """Take the methods of an interface, if there is one."""
        if methods:
            self.is_scriptable = True
            self._target_future = target_future((self.module_rref, self.device))
        for name, method in methods.items():
            setattr(self, name, types.MethodType(method, self))

    @staticmethod
    def init_from_module_rref(
        remote_device: str | torch.device, module_rref: RRef, _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Make a RemoteModule from a module that exists already.

        Args:
            remote_device: as for the constructor; the module's device.
            module_rref: refers to the module, on any worker.
            _module_interface_cls: as for the constructor.
        """
        made = RemoteModule.__new__(RemoteModule)
        torch.nn.Module.__init__(made)
        made._choose_worker(remote_device)
        made.module_rref = module_rref
        if _module_interface_cls is not None:
            made._take_methods(scripted_methods(_module_interface_cls, _begin))
        return made

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the module's forward; return a future of its result."""
        return _begin((self.module_rref, self.device), args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, and return its result."""
        return self.forward_async(*args, **kwargs).wait()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`forward`."""
        return self.forward(*args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef]:
        """Return references to the module's parameters; without ``recurse``, not to those of submodules."""
        found: list[RRef] = rpc_sync(self.module_rref.owner(), _parameters, (self.module_rref, recurse))
        return found

    def get_module_rref(self) -> RRef:
        """Return the reference to the module."""
        return self.module_rref

    def train(self: M, mode: bool = True) -> M:
        """Put the module into training mode; with ``mode=False``, into evaluation mode."""
        rpc_sync(self.module_rref.owner(), _train, (self.module_rref, mode))
        return self

    def eval(self: M) -> M:
        """Put the module into evaluation mode."""
        return self.train(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r}, {self.module_rref!r})"

    def __reduce__(self) -> Any:
        if reducer_in_progress(RRef) is None:
            raise RemoteReferenceError(NOT_PICKLED)
        if self.is_scriptable:
            raise RemoteReferenceError(
                "Passing a script RemoteModule over RPC is not supported. Send its module_rref, and make"
                " another of that by RemoteModule.init_from_module_rref"
            )
        left = vars(self).keys() - vars(torch.nn.Module()).keys() - set(PICKLED_ATTRIBUTES) - set(_METHODS)
        if left:
            _log.warning("not sent with a RemoteModule: its attributes %s", ", ".join(sorted(left)))
        return _received, (type(self), [vars(self)[name] for name in PICKLED_ATTRIBUTES])


def _begin(
    target: tuple[RRef, str], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Future[Any]:
    """Begin a call of a module, given by a reference to it and its device."""
    rref, device = target
    return rpc_async(rref.owner(), _forward, (rref, device, args, kwargs or {}))


def _received(kind: type[RemoteModule], attributes: list[Any]) -> RemoteModule:
    """Make a received RemoteModule: it has these attributes and methods, and no module state."""
    made = kind.__new__(kind)
    vars(made).update(zip(PICKLED_ATTRIBUTES, attributes, strict=True))
    vars(made).update({name: getattr(made, name) for name in _METHODS})
    return made


def _not_supported(name: str, hint: str = "") -> Callable[..., Any]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        """Raise an InvalidArgumentError: the method is not supported for a remote module."""
        raise InvalidArgumentError(f"Method ``{name}`` not supported for RemoteModule{hint}")

    method.__name__ = name
    return method


# torch.jit.script cannot read an annotation's text.
RemoteModule.__annotations__["_target_future"] = TargetFuture

_NOT_SUPPORTED = """
    add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu load_state_dict
    modules named_buffers named_children named_modules named_parameters register_backward_hook
    register_buffer register_forward_hook register_forward_pre_hook register_parameter requires_grad_
    share_memory state_dict to type xpu zero_grad
"""
for _name in _NOT_SUPPORTED.split():
    setattr(RemoteModule, _name, _not_supported(_name))
RemoteModule.parameters = _not_supported(  # type: ignore[method-assign]
    "parameters", ". Please use ``remote_parameters`` instead."
)


# Functions that the module's worker runs.

# Threads that compile modules of one class at once each add its methods to the same type: torch refuses that.
_scripting = threading.Lock()


def _make_module(
    module_cls: Callable[..., torch.nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    scripted: bool,
) -> torch.nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an"
            f" instance of {type(module)}."
        )
    made = module.to(device)
    if not scripted:
        return made
    with _scripting:
        return torch.jit.script(made)


def _forward(module_rref: RRef, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module: torch.nn.Module = module_rref.local_value()
    if device == "cpu":
        return module(*args, **kwargs)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), module(*args, **kwargs))


def _parameters(module_rref: RRef, recurse: bool) -> list[RRef]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _train(module_rref: RRef, mode: bool) -> None:
    module_rref.local_value().train(mode)
