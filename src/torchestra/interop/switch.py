"""The switch: groups of torch.distributed whose backend is "gloo" are made on torchestra's engine.

With ``TORCHESTRA_FOR=gloo`` in the environment a program that names no backend, ``"gloo"`` or
``"cpu:gloo,cuda:nccl"`` is served by torchestra, unchanged. All of torch's functions that make groups call
``_new_process_group_helper``. The switch gives that another body, which asks torch for a group of the backend
"torchestra" and gives it the name that the program knows. This module does not load the engine.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torchestra.interop.redirection import redirect
from torchestra.interop.registration import BACKEND
from torchestra.system.switch import SWITCH_VARIABLE

_log = logging.getLogger(__name__)

_GLOO = "gloo"
_DEVICES = ("cpu", "cuda")
_on = False
_telling = True


def is_on() -> bool:
    """Return whether torchestra serves "gloo" in this process."""
    return _on


def turn_on(*, telling: bool = True) -> None:
    """Make torchestra serve "gloo" in this process from now on; existing groups stay as they are.

    Args:
        telling: log a line when a default group is made.
    """
    global _on, _telling
    from torch.distributed import distributed_c10d as c10d

    redirect(c10d._new_process_group_helper, _on_torchestra)
    _on, _telling = True, telling


def turn_off() -> None:
    """Undo :func:`turn_on`; existing groups stay as they are."""
    global _on
    _on = False


def _on_torchestra(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import distributed_c10d as c10d

        call = signature.bind(*args, **kwargs)
        backend, ranks = call.arguments["backend"], call.arguments["global_ranks_in_group"]
        served = served_by_us(backend) if _on else None
        if served is None:
            return original(*args, **kwargs)
        call.arguments["backend"] = c10d.Backend(served)
        known = set(c10d._world.pg_map)
        group, store = original(*call.args, **call.kwargs)
        if group is not c10d.GroupMember.NON_GROUP_MEMBER and group not in known:
            group.report_as(_GLOO)
            c10d._world.pg_map[group] = (backend, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
            if _telling and not len(ranks):
                _tell(group, served)
        return group, store

    return new_process_group


def served_by_us(backend: str) -> str | None:
    """Return the backend to request from torch in place of a program's; None if that stays as it is.

    The devices that torchestra serves come first, since torch takes the first group written in Python for the
    whole group.
    """
    from torch.distributed import distributed_c10d as c10d

    if getattr(c10d, "_use_torchcomms_enabled", bool)():
        _log.warning("%s=gloo has no effect: this program has turned on torchcomms", SWITCH_VARIABLE)
        return None
    if backend.lower() == _GLOO:
        return BACKEND
    if ":" not in backend and backend.lower() != c10d.Backend.UNDEFINED:
        return None
    devices = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
    ours = [device for device, name in devices.items() if name == _GLOO and device in _DEVICES]
    if not ours:
        return None
    others = [f"{device}:{name}" for device, name in devices.items() if device not in ours]
    return ",".join([*(f"{device}:{BACKEND}" for device in ours), *others])


def _tell(group: Any, served: str) -> None:
    """Tell once, on rank 0 of the default group, what serves the program."""
    if group.rank() == 0:
        from torchestra import __version__

        _log.warning(
            'torchestra %s serves "gloo" here (%s=gloo): %d ranks, %s',
            __version__,
            SWITCH_VARIABLE,
            group.size(),
            f"backends {served!r}" if ":" in served else "tensors of the CPU and of CUDA through its memory",
        )
