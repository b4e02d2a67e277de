"""The launcher's connection to its fork server: starts the server, sends it requests and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

from torchestra.launcher.channel import channel
from torchestra.launcher.fork_server import serve


class ForkServerClient:
    """A fork server that is this process's child.

    Attributes:
        end: this side of the channel to the server.
        ready: whether the server has loaded everything.
    """

    def __init__(self, end: socket.socket, wait: Callable[[], object], kill: Callable[[], object]) -> None:
        self.end = end
        self.ready = False
        self._wait = wait
        self._kill = kill

    @classmethod
    def forked(cls) -> ForkServerClient:
        """Fork a server from this process, which must have a single thread and nothing half done."""
        ours, theirs = channel()
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            serve(theirs, launcher)
        theirs.close()
        return cls(ours, lambda: os.waitpid(pid, 0), lambda: os.kill(pid, signal.SIGKILL))

    @classmethod
    def spawned(cls, environment: Mapping[str, str]) -> ForkServerClient:
        """Start a server that is a fresh interpreter, whatever this process has done before."""
        ours, theirs = channel()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from torchestra.launcher.fork_server import serve_descriptor\n"
            f"serve_descriptor({theirs.fileno()})"
        )
        # The interpreter's own record of its command-line flags, as multiprocessing uses it.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                start_new_session=True,
            )
        return cls(ours, process.wait, process.kill)

    def alive(self) -> bool:
        """Return whether the server still takes requests, as far as can be told while it has no job."""
        try:
            return self.end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End the server, which kills the processes that its job left running, and wait until it is gone."""
        self.end.close()
        if not self.ready:
            self._kill()
        self._wait()

    def forget(self) -> None:
        """Drop a handle that a fork copied into another process; the server is not that process's."""
        self.end.close()
