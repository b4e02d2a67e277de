"""``python -m torchestra.store.tcp``: a store's server in a process of its own, until it is stopped."""

from __future__ import annotations

import argparse
import resource
import signal
import threading

from torchestra.errors import DistError
from torchestra.store.tcp.server import TCPStoreServer


def main() -> None:
    """Serve until SIGINT or SIGTERM; the first line of output is the address."""
    parser = argparse.ArgumentParser(
        prog="python -m torchestra.store.tcp",
        description="Serve a store to TCPStore clients. The environment variable TORCHESTRA_SECRET, if set, "
        "is what they must prove to know.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the interface to listen on; %(default)s")
    parser.add_argument("--port", type=int, default=0, help="the port; 0, the default, has one chosen")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    stop = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop.set())
    try:
        server = TCPStoreServer(options.host, options.port)
    except DistError as error:
        parser.exit(1, f"{error}\n")
    with server:
        print(f"{server.host}:{server.port}", flush=True)
        while not stop.wait(1.0):
            pass


if __name__ == "__main__":
    main()
