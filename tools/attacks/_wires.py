"""Connections of RPC workers that pretend to be on several hosts, and messages between them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from tools.attacks._target import SERVED_SECONDS

from torchestra.transport.message import Message
from torchestra.transport.transport import Transport

HERE = "127.0.0.1"


class Worker:
    """One end: its connections, and the tags of the messages that came."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.came: list[int] = []
        self.wire = Transport(f"worker{rank}", HERE, None, SERVED_SECONDS, self._arrived)
        self.text = np.zeros(10, np.uint8)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self.wire.endpoint.address.removeprefix("tcp://").rsplit(":", 1)
        return host, int(port)

    def join(self, others: list[Worker]) -> None:
        """Meet the others."""
        cards = {other.rank: other.wire.endpoint for other in others if other is not self}
        self.wire.join(cards, {rank: f"worker{rank}" for rank in cards}, SERVED_SECONDS)

    def _arrived(self, message: Message) -> None:
        self.came.append(message.tag)

    def tell(self, other: Worker) -> None:
        """Send a message, and wait until it has come.

        Raises:
            RuntimeError: it does not come, or the connection has ended.
        """
        tag = len(other.came)
        self.wire.send(other.rank, 1, tag, [(self.text.ctypes.data, self.text.nbytes)], None)
        deadline = time.monotonic() + SERVED_SECONDS
        while len(other.came) <= tag:
            if time.monotonic() > deadline or other.rank in self.wire.lost():
                raise RuntimeError(f"a message has not come: {self.wire.lost()}")
            time.sleep(0.0005)


@contextlib.contextmanager
def workers(size: int) -> Iterator[list[Worker]]:
    """That many, who have not met yet."""
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(size):
            made.append(Worker(rank))
            stack.callback(made[-1].wire.close)
        yield made


def meet(made: list[Worker], look: Callable[[], object] = lambda: None) -> None:
    """Have them all meet, and call ``look`` meanwhile.

    Raises:
        Exception: what one of them raised.
    """
    failed: list[BaseException] = []

    def join(worker: Worker) -> None:
        try:
            worker.join(made)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=join, args=(worker,)) for worker in made]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        look()
        time.sleep(0.005)
    if failed:
        raise failed[0]
