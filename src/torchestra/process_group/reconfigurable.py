"""Make a group without peers, for ``reconfigure()``."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchestra.arguments.options import GroupOptions
from torchestra.engine.device.agreement import DeviceRequest
from torchestra.errors import InvalidArgumentError
from torchestra.process_group.group import ProcessGroup
from torchestra.process_group.reconfiguring import Reconfiguration, without_peers
from torchestra.store import HashStore, Store
from torchestra.store.secret import Secret, job_secret


def reconfigurable_group(
    rank: int,
    size: int,
    name: str,
    options: GroupOptions,
    *,
    backend: str,
    timeout_s: float,
    description: str = "undefined",
    store: Store | None = None,
    ranks: Sequence[int] | None = None,
    secret: Secret = None,
    program: threading.Thread | None = None,
    request: DeviceRequest = DeviceRequest(),  # noqa: B008 - it is frozen
) -> ProcessGroup:
    """Return a group of which only this rank is known; it meets no other.

    Args:
        rank, size, ranks: what it says of itself until it is reconfigured.
        store: what ``get_group_store()`` returns until then.
        timeout_s: for operations, and for the others to come to a call of ``reconfigure()``.
        name, options, backend, description, program, request: of the group.
        secret: the ranks prove to each other to know it; the environment variable TORCHESTRA_SECRET if None.

    Raises:
        InvalidArgumentError: the backend is a fake one, or the rank is none.
    """
    if backend == "fake":
        raise InvalidArgumentError('enable_reconfigure: backend "fake" has no other ranks')
    group = ProcessGroup(
        HashStore() if store is None else store,
        rank,
        size,
        options,
        ranks=ranks,
        description=description,
        communicator=without_peers(rank, size, name, timeout_s),
    )
    thread = threading.current_thread() if program is None else program
    group.reconfiguration = Reconfiguration(name, backend, job_secret(secret), thread, request)
    group.bound_device_id = request.device
    return group
