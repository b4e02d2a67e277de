"""torch's names for backends, and the backend of torchestra that each means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torchestra.compat.registered import Creator, maker_of
from torchestra.engine.device.nccl import is_nccl_built
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.process_group.group import GroupMaker
from torchestra.process_group.starting import BACKENDS
from torchestra.world import backend_info
from torchestra.world.init import AnyGroup

__all__ = [
    "Backend",
    "BackendConfig",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "is_backend_available",
    "is_gloo_available",
]

_OWN = {"gloo", "threaded", "undefined"}


class UnknownBackendError(DistBackendError, AssertionError):
    """There is no backend of this name. An AssertionError as well, because torch raises one there."""


class _Plugin(NamedTuple):
    creator_fn: Creator
    extended_api: bool


class Backend(backend_info.Backend):
    """``Backend(name)`` is the name in lower case; the known ones are attributes.

    ``GLOO`` is torchestra's own engine, ``FAKE`` the fake world. ``NCCL`` is for CUDA tensors, where this
    torch has it. Others of torch's, such as UCC, are not available; programs can
    register their own.
    """

    _BackendPlugin = _Plugin
    _plugins: ClassVar[dict[str, _Plugin]] = {}
    backend_list: ClassVar[list[str]] = ["undefined", "gloo", "nccl", "xccl", "ucc", "mpi", "fake"]
    default_device_backend_map: ClassVar[dict[str, str]] = {
        "cpu": "gloo",
        "cuda": "gloo",
        "xpu": "xccl",
        "mps": "gloo",
    }
    backend_capability: ClassVar[dict[str, list[str]]] = {
        "gloo": ["cpu", "cuda"],
        "nccl": ["cuda"],
        "xccl": ["xpu"],
        "ucc": ["cpu", "cuda"],
        "mpi": ["cpu", "cuda"],
        "fake": ["cpu", "cuda", "hpu", "xpu"],
    }

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Creator,
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register a backend, its devices, and the function that makes its groups.

        Args:
            name: in any case; ``Backend.NAME`` is the name in lower case from then on.
            func: returns a group of a class derived from :class:`~torchestra.compat.ProcessGroup`; called
                with a store, this rank, the number of ranks, and a time-out (a timedelta).
            extended_api: if true, ``func`` gets a DistributedBackendOptions and ``pg_options`` instead.
            devices: kinds of devices; default: the CPU and CUDA.
        """
        lower = name.lower()
        if not hasattr(cls, name.upper()):
            setattr(cls, name.upper(), lower)
        if lower not in cls.backend_list:
            cls.backend_list.append(lower)
        kinds = (
            ["cpu", "cuda"] if devices is None else [devices] if isinstance(devices, str) else list(devices)
        )
        cls.backend_capability[lower] = kinds
        if devices is not None:
            for kind in kinds:
                cls.default_device_backend_map.setdefault(kind, lower)
        cls._plugins[name.upper()] = _Plugin(func, extended_api)


class BackendConfig:
    """The backend of each device, from a text like ``"gloo"`` or ``"cpu:gloo,cuda:gloo"``.

    Raises:
        InvalidArgumentError: the text does not have this form, or names a device twice.
    """

    def __init__(self, backend: str) -> None:
        self.device_backend_map: dict[str, str] = {}
        text = str(backend).lower()
        if text == Backend.UNDEFINED:
            self.device_backend_map = {
                device: name
                for device, name in Backend.default_device_backend_map.items()
                if device in Backend.backend_capability.get(name, ()) and is_backend_available(name)
            }
        elif ":" not in text:
            self.device_backend_map = dict.fromkeys(
                Backend.backend_capability.get(text, ["cpu", "cuda"]), Backend(text)
            )
        else:
            for pair in text.split(","):
                device, colon, name = pair.partition(":")
                if not (device and colon and name) or ":" in name:
                    raise InvalidArgumentError(
                        f"Invalid device:backend pairing: {pair!r}. The custom backend string argument is"
                        f" invalid: {backend}; it must be like 'cpu:gloo,cuda:gloo'"
                    )
                if device in self.device_backend_map:
                    raise InvalidArgumentError(f"Duplicate device type {device} in backend string: {backend}")
                self.device_backend_map[device] = Backend(name)

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backends by device."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())


def registered(backend: str | None, options: Any = None) -> GroupMaker | None:
    """Return the function that makes groups of a registered backend; None for other backends.

    Args:
        backend: its name, or ``"cpu:name,cuda:name"``.
        options: for a creator that takes them.

    Raises:
        DistBackendError: ``backend`` names several backends, one of them registered.
    """
    if backend is None:
        return None
    names = set(BackendConfig(backend).device_backend_map.values()) if ":" in backend else {Backend(backend)}
    plugins = {name: plugin for name in names if (plugin := Backend._plugins.get(name.upper())) is not None}
    if not plugins:
        return None
    if len(names) > 1:
        raise DistBackendError(f"a group has one backend for all devices, got backend={backend!r}")
    (name, plugin), *_ = plugins.items()
    return maker_of(name, plugin.creator_fn, plugin.extended_api, options)


def engine_of(backend: str | None) -> str | None:
    """Return torchestra's backend by torch's name; None for the one that the rank was launched with.

    Raises:
        DistBackendError: torchestra has no such backend; an UnknownBackendError if torch has none either.
        InvalidArgumentError: ``backend`` is not a name.
    """
    if backend is None:
        return None
    names = set(BackendConfig(backend).device_backend_map.values()) if ":" in backend else {Backend(backend)}
    nccl = Backend.NCCL in names and is_nccl_built()
    strange = names - _OWN - set(BACKENDS) - ({Backend.NCCL} if nccl else set())
    if strange:
        name = min(strange)
        if name.upper() in Backend._plugins:
            raise DistBackendError(
                f"subgroups of the registered backend {name!r} are made one by one, with new_group(), or by"
                f" leaving `backend` out where it is the default group's; got backend={backend!r}"
            )
        if name not in Backend.backend_list:
            raise UnknownBackendError(
                f'Unknown backend type {name}: torchestra runs "gloo", which is its own engine, "fake", and'
                f" what Backend.register_backend() was given; got backend={backend!r}"
            )
        raise DistBackendError(
            f'Distributed package doesn\'t have {name.upper()} built in: torchestra runs "gloo", which is its'
            f' own engine (and moves CUDA tensors through the host), and "fake"; got backend={backend!r}'
        )
    if nccl:
        return Backend.NCCL
    chosen = names - _OWN
    if len(names) > 1 and chosen:
        raise DistBackendError(f"one engine serves all devices, got backend={backend!r}")
    return chosen.pop() if chosen else None


def is_gloo_available() -> bool:
    """Return True: torchestra's own engine does what Gloo does."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether a backend by torch's name, or each of ``"cpu:gloo,cuda:nccl"``, is available."""
    names = BackendConfig(backend).device_backend_map.values() if ":" in backend else [backend]
    plugins = {name.lower() for name in Backend._plugins}
    return all(
        name.lower() in {"gloo", *plugins} or backend_info.is_backend_available(name.lower())
        for name in names
    )


def get_backend(group: AnyGroup | None = None) -> str:
    """Return the backend of a group by torch's name: ``"gloo"``, ``"fake"`` or a registered one's.

    Args:
        group: default: the default group.

    Raises:
        InvalidArgumentError: this rank is not in the group.
    """
    own = backend_info.get_backend(group)
    return Backend.GLOO if own in ("native", "threads") else own


def get_backend_config(group: AnyGroup | None = None) -> str:
    """Return the backend of a group (default: the default group) for each device.

    That is ``"cpu:gloo,cuda:gloo"``, or ``"cpu:gloo,cuda:nccl"`` where NCCL serves CUDA tensors.
    """
    own = get_backend(group)
    delegates = backend_info.get_backend_config(group).endswith("cuda:nccl")
    return f"cpu:{own},cuda:nccl" if delegates else repr(BackendConfig(own))


def get_default_backend_for_device(device: Any) -> str:
    """Return the backend that serves a device (``"cuda:0"`` or a torch.device).

    Raises:
        InvalidArgumentError: no backend is registered for its type.
    """
    kind = str(device).partition(":")[0]
    if kind not in Backend.default_device_backend_map:
        raise InvalidArgumentError(f"Default backend not registered for device : {device}")
    return Backend.default_device_backend_map[kind]
