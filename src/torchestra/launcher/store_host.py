"""The process that serves a job's store: not a rank, so that no rank's death takes the store with it."""

from __future__ import annotations

import signal
from typing import NoReturn

from torchestra.launcher.spec import JobSpec

__all__ = ["serve_store"]


def serve_store(spec: JobSpec, listener: int) -> NoReturn:
    """Serve the store of ``spec``'s job on the listening socket until this process is killed."""
    from torchestra.store import TCPStoreServer

    with TCPStoreServer(listen_fd=listener, secret=spec.environment["TORCHESTRA_SECRET"]):
        while True:
            signal.pause()
