"""The standard input of a job: rank 0 has the launcher's, the others have none.

A file or a pipe is simply inherited. A terminal cannot be: each rank has its own process group,
and only the launcher's may read the terminal. So the launcher forwards terminal input, line by line,
which is enough for ``input()`` and for ``breakpoint()`` in rank 0.
"""

from __future__ import annotations

import os
import signal
import time

from torchestra.launcher.event_loop import EventLoop

_READ_SIZE = 4096
_RETRY_S = 0.25


class StandardInput:
    """The standard input of rank 0.

    Attributes:
        for_rank: the descriptor to hand to rank 0.
    """

    def __init__(self) -> None:
        self._to_rank: int | None = None
        self.for_rank = 0
        if os.isatty(0):
            self.for_rank, self._to_rank = os.pipe()
            os.set_blocking(self._to_rank, False)

    def relay(self, loop: EventLoop) -> None:
        """Forward terminal input while the job's loop runs; do nothing if the input is not a terminal."""
        if self._to_rank is not None:
            # Reading from the background is then an error rather than a stop of the launcher.
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)
            loop.watch(0, lambda: self._pass_on(loop))

    def _pass_on(self, loop: EventLoop) -> None:
        assert self._to_rank is not None
        try:
            typed = os.read(0, _READ_SIZE)
            if typed:
                os.write(self._to_rank, typed)
                return
        except BlockingIOError:
            return
        except BrokenPipeError:
            typed = b""
        except OSError:
            # In the background, where another program has the terminal: try again later.
            loop.unwatch(0)
            loop.call_at(time.monotonic() + _RETRY_S, lambda: loop.watch(0, lambda: self._pass_on(loop)))
            return
        loop.unwatch(0)
        os.close(self._to_rank)  # rank 0's input has ended
        self._to_rank = None
