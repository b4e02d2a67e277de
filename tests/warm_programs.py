"""Programs that begin with torch loaded: `python -m MODULE` without the seconds that a new interpreter takes.

A server, which is a fresh interpreter with a single thread, loads what programs need once, and forks them.
Each finds the arguments, environment, working directory and standard files that it would find as a program of
its own, and is used as any other :class:`subprocess.Popen`. It is no child of the test's process but of the
server's, which tells its exit code. When the test's process has ended, the server kills what is left, and
ends.

Not the same as in a new interpreter are ``sys.flags``, and what is loaded already. Where that matters a
test starts an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from typing import Any, NoReturn

TAG = "TORCHESTRA_TEST_TAG"  # by which the fixture nothing_left knows processes
_NO_TAG = "0" * 32

# Of the process with that id, which has started it.
_server: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None
_lock = threading.Lock()


class WarmProgram(subprocess.Popen[str]):
    """Run ``[sys.executable, "-m", MODULE, ...]``, forked from the server; arguments are Popen's."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        """Have the server fork the program, where Popen would start one."""
        options = inspect.signature(subprocess.Popen._execute_child).bind(self, *given, **named).arguments
        command = options["args"]
        assert command[:2] == [sys.executable, "-m"], f"not a module: {command}"
        assert options["preexec_fn"] is None, "a forked program calls no preexec_fn"
        assert not options["pass_fds"], "a forked program gets no other files"
        environment = dict(os.environ if options["env"] is None else options["env"])
        request = {
            "module": command[2],
            "arguments": command[3:],
            "environment": environment,
            "directory": os.fspath(options["cwd"] or os.getcwd()),
            "new_session": options["start_new_session"],
        }
        ours = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [each if each != -1 else standard for standard, each in enumerate(ours)]
        self._status, theirs = os.pipe()
        with _lock:
            server = _connection()
            text = json.dumps(request).encode()
            socket.send_fds(server, [struct.pack("=Q", len(text))], [*files, theirs])
            server.sendall(text)
            (self.pid,) = struct.unpack("=Q", _exactly(server, 8))
        os.close(theirs)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in _PIPES))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        """Return the exit code if it has ended."""
        if self.returncode is None and self._child_created and select.select([self._status], [], [], 0)[0]:
            told = os.read(self._status, 4)
            os.close(self._status)
            self.returncode = struct.unpack("=i", told)[0] if told else -signal.SIGKILL  # with the server
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
            if self._internal_poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _connection() -> socket.socket:
    """Return the connection to this process's server, which is started if need be."""
    global _server
    if _server is None or _server[0] != os.getpid():
        ours, theirs = socket.socketpair()
        program = f"import sys; sys.path[:] = {sys.path!r}; import warm_programs; warm_programs.serve()"
        environment = {**os.environ, TAG: _NO_TAG}
        with theirs:
            process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs, env=environment)
        _server = os.getpid(), ours, process
        atexit.register(_stop_server)
    return _server[1]


def _stop_server() -> None:
    if _server is not None and _server[0] == os.getpid():
        _server[1].close()
        _server[2].wait()


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += (piece := connection.recv(nbytes - len(data)))
        if not piece:
            raise ConnectionError("the server of warm programs, or the test's process, has ended")
    return data


def serve() -> NoReturn:
    """Fork programs, as they are asked for by standard input, a socket, until that is closed."""
    connection = socket.socket(fileno=os.dup(0))
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    tag: int = libc.getenv(TAG.encode())  # in the memory that /proc/PID/environ shows
    _load()
    statuses: dict[int, int] = {}  # where to write how a program has ended, by its pid
    wakes, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test's process
    try:
        while True:
            ready = select.select([connection, wakes], [], [])[0]
            if wakes in ready:
                os.read(wakes, 4096)
                _tell_ended(statuses)
            if connection in ready:
                header, files, *_ = socket.recv_fds(connection, 8, 4)
                if not header:
                    break
                request = json.loads(_exactly(connection, struct.unpack("=Q", header)[0]))
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    for each in (connection.detach(), wakes, waker, quiet, *statuses.values(), files[3]):
                        os.close(each)
                    _become(request, files[:3], tag)
                for each in files[:3]:
                    os.close(each)
                statuses[pid] = files[3]
                connection.sendall(struct.pack("=Q", pid))
    finally:
        for pid in statuses:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _load() -> None:
    """Import what programs need, once."""
    import numpy as np
    import torch
    import torch._dynamo

    import torchestra
    from torchestra.engine import warm_up
    from torchestra.launcher import command

    assert torch.is_tensor(torch.zeros(1))
    for name in torchestra.__all__:
        getattr(torchestra, name)
    assert command is not None
    warm_up()
    np.random.seed()
    finalizers: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer in finalizers:  # a program that ends would undo what the server has loaded
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"


def _tell_ended(statuses: dict[int, int]) -> None:
    """Write the exit code of each program that has ended, as Popen has it."""
    for pid in list(statuses):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            file = statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(file, struct.pack("=i", os.waitstatus_to_exitcode(status)))
            os.close(file)


def _become(request: dict[str, Any], files: list[int], tag: int) -> NoReturn:
    """Be the program, from its beginning to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    if (own := os.environ.get(TAG)) is not None:
        assert len(own) == len(_NO_TAG)
        ctypes.memmove(tag, own.encode(), len(own))
    os.chdir(request["directory"])
    sys.path[:] = [request["directory"], *_added(request["environment"]), *sys.path]
    sys.argv = [request["module"], *request["arguments"]]
    code = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _added(environment: dict[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH that a program would have besides."""
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
