"""Programs that begin with torch loaded, without the seconds that a new interpreter takes for it.

They are what an interpreter is given as ``-m MODULE``, ``-c TEXT`` or a path. A server, which is
a fresh interpreter with a single thread, loads what programs need once, and forks them. Each finds the
arguments, environment, working directory and files that it would find as a program of its own, and is used as
any other :class:`subprocess.Popen`. It is no child of the test's process but of the server's, which tells its
exit code. When the test's process has ended, the server kills what is left of what that has started. It ends
with the process that has started it: pytest, whose workers share it, or a test's that found none.

Not the same as in a new interpreter are ``sys.flags``, ``os.getppid()``, and what is loaded already: of the
environment's variables that libraries read when they are loaded, only OMP_NUM_THREADS is obeyed. Where that
matters a test starts an interpreter.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import inspect
import io
import json
import os
import re
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import tokenize
import traceback
import types
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, BinaryIO, NoReturn, cast

TAG = "TORCHESTRA_TEST_TAG"  # by which the fixture nothing_left knows processes
_NO_TAG = "0" * 1024
SERVER = "TORCHESTRA_TEST_WARM"  # where pytest's workers, and programs that it has forked, find the server

# The connection to it of the process with that id, and its address, an abstract one.
_server: tuple[int, socket.socket, str] | None = None
_is_program = False
_lock = threading.Lock()
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)


class WarmProgram(subprocess.Popen[Any]):
    """Run what an interpreter is, ``[sys.executable, ...]``, forked from the server; options are Popen's.

    Attributes:
        nested: whether interpreters that the program starts with subprocess are forked as well.
        finalizes: whether it ends as an interpreter does, which takes apart what it has loaded.
    """

    nested = finalizes = False

    def _execute_child(self, *given: Any, **named: Any) -> None:
        """Have the server fork the program, where Popen would start one."""
        options = _SIGNATURE.bind(self, *given, **named).arguments
        command = [os.fspath(each) for each in options["args"]]
        assert is_python(command), f"neither a module, a program nor a script for this interpreter: {command}"
        preexec_fn, group = options["preexec_fn"], options.get("process_group", -1)
        assert preexec_fn in (None, os.setpgrp), "a forked program calls no preexec_fn"
        kept: list[int] = sorted(options["pass_fds"])
        environment = dict(os.environ if options["env"] is None else options["env"])
        request = {
            "command": command[1:],
            "environment": environment,
            "directory": os.fspath(options["cwd"] or os.getcwd()),
            "new_session": options["start_new_session"],
            "new_group": preexec_fn is not None or group == 0,
            "kept": kept,
            "nested": self.nested,
            "finalizes": self.finalizes,
            "path": sys.path,
            "outlives": _is_program,
        }
        ours = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [each if each != -1 else standard for standard, each in enumerate(ours)]
        self._status, theirs = os.pipe()
        with _lock:
            server = _connection()
            text = json.dumps(request).encode()
            socket.send_fds(server, [struct.pack("=Q", len(text))], [theirs, *files, *kept])
            server.sendall(text)
            (self.pid,) = struct.unpack("=Q", _exactly(server, 8))
        os.close(theirs)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in _PIPES))

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
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


class WarmIfPython(WarmProgram):
    """Run any command as Popen does, but fork what is for this interpreter."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        options = _SIGNATURE.bind(self, *given, **named).arguments
        self._warm = not options["shell"] and is_python(options["args"])
        run = super() if self._warm else super(WarmProgram, self)
        run._execute_child(*given, **named)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        poll = super() if getattr(self, "_warm", True) else super(WarmProgram, self)
        return poll._internal_poll(*given, **named)

    def _wait(self, timeout: float | None) -> int:
        wait = super() if self._warm else super(WarmProgram, self)
        return wait._wait(timeout)


class NestedWarm(WarmIfPython):
    """Run any command as Popen does, but fork what is for this interpreter, and what that starts."""

    nested = True


class FinalizedWarm(WarmProgram):
    """Run a program that is forked and ends as an interpreter does: for tests of what happens then."""

    finalizes = True


class WarmSubprocess:
    """Stands for the module subprocess where a test wants what some module starts to be forked."""

    Popen = WarmIfPython

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def run_warm(
    command: Sequence[Any],
    *,
    timeout: float,
    capture_output: bool = False,
    kind: type[WarmProgram] = WarmProgram,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program as :func:`subprocess.run` does, but forked."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with kind(command, **options) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(command, program.returncode, out, err)


def without_leaks(text: str) -> str:
    """Return what a program has printed without what nanobind tells of Triton, which torch for CUDA brings.

    It does so when a process that has loaded Triton is finalized.
    """
    return re.sub(r"(?ms)^nanobind: leaked .*?^See https://nanobind\S*\n?", "", text)


def is_python(command: Any) -> bool:
    """Return whether a command is this interpreter with a module, a text or a script; -u may come first."""
    if isinstance(command, (str, bytes)) or not (words := [str(each) for each in command]):
        return False
    interpreter, *options = words
    first, *others = options[options[:1] == ["-u"] :] or ["-"]
    own = first in ("-m", "-c") and others != []
    return interpreter == sys.executable and (own or not first.startswith("-"))


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _connection() -> socket.socket:
    """Return the connection to this process's server, which is started if need be."""
    global _server
    if _server is None or _server[0] != os.getpid():
        if address := os.environ.get(SERVER):
            ours = socket.socket(socket.AF_UNIX)
            ours.connect("\0" + address)
            atexit.register(ours.close)
            _server = os.getpid(), ours, address
        else:
            _server = _start_server()
    return _server[1]


def share_server() -> str:
    """Have the processes that this one starts use its server, as loading takes each 5 s of a processor.

    Returns:
        the server's address.
    """
    _connection()
    assert _server is not None
    os.environ[SERVER] = address = _server[2]
    return address


def _start_server() -> tuple[int, socket.socket, str]:
    """Start a server that ends with this process."""
    ours, theirs = socket.socketpair()
    address = f"torchestra-test-{secrets.token_hex(16)}"
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import warm_programs; warm_programs.serve({address!r})"
    )
    environment = {**os.environ, TAG: _NO_TAG}
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs, env=environment)
    atexit.register(_stop_server, os.getpid(), ours, process)
    return os.getpid(), ours, address


def _stop_server(pid: int, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    if pid == os.getpid():
        connection.close()
        process.wait()


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += (piece := connection.recv(nbytes - len(data)))
        if not piece:
            raise ConnectionError("the server of warm programs, or the test's process, has ended")
    return data


def serve(address: str) -> None:
    """Fork programs, as they are asked for by standard input, a socket, until that is closed.

    Others may ask too, the programs themselves among them, at the address, an abstract one. It returns in a
    program that is to end as an interpreter does.
    """
    server = os.getpid()
    connections = [socket.socket(fileno=os.dup(0))]
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.close(quiet)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    tag: int = libc.getenv(TAG.encode())  # in the memory that /proc/PID/environ shows
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen()  # who connects meanwhile waits
    _load()
    statuses: dict[int, int] = {}  # where to write how a program has ended, by its pid
    dependents: dict[socket.socket, list[int]] = {}  # what is killed when a connection ends
    wakes, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test's process
    try:
        while True:
            ready = select.select([*connections, listener, wakes], [], [])[0]
            if wakes in ready:
                os.read(wakes, 4096)
                _tell_ended(statuses)
            if listener in ready:
                connections.append(listener.accept()[0])
            for connection in [each for each in connections if each in ready]:
                try:
                    header, files, *_ = socket.recv_fds(connection, 8, 64)
                    text = _exactly(connection, struct.unpack("=Q", header)[0]) if header else b""
                except ConnectionError:  # it was killed meanwhile
                    text = b""
                if not text and connection is connections[0]:
                    return
                if not text:
                    _kill(dependents.pop(connection, []), statuses)
                    connections.remove(connection)
                    connection.close()
                    continue
                request = json.loads(text)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    for each in (*connections, listener):
                        each.close()
                    for number in (wakes, waker, *statuses.values(), files[0]):
                        os.close(number)
                    _become(request, files[1:], tag, address)
                    if not request["finalizes"]:
                        _run_and_exit(request)
                    _run(request["command"], _added(request["environment"]))
                    return
                for number in files[1:]:
                    os.close(number)
                statuses[pid] = files[0]
                if not request["outlives"]:
                    dependents.setdefault(connection, []).append(pid)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(struct.pack("=Q", pid))
    finally:
        if os.getpid() == server:
            _kill(statuses, statuses)
            os._exit(0)


def _kill(pids: Iterable[int], statuses: Collection[int]) -> None:
    """Kill programs unless it was told how they ended: their numbers may be others' since."""
    for pid in pids:
        if pid in statuses:
            os.kill(pid, signal.SIGKILL)


def _load() -> None:
    """Import what programs need, once."""
    gc.disable()  # it would take a fifth of the time
    import numpy as np
    import torch
    import torch._dynamo

    import torchestra
    from torchestra.engine import warm_up
    from torchestra.launcher import command

    assert torch.is_tensor(torch.zeros(1))
    with contextlib.suppress(ImportError):
        import sklearn.datasets  # noqa: F401, for the examples, each of whose ranks would load it
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
    gc.enable()
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


def _become(request: dict[str, Any], files: list[int], tag: int, server: str) -> None:
    """Give this process what the program shall find."""
    import torch

    global _server, _is_program
    _server, _is_program = None, True
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _move(files, [0, 1, 2, *request["kept"]])
    if request["new_session"]:
        os.setsid()
    elif request["new_group"]:
        os.setpgrp()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.pop(SERVER, None)
    tempfile.tempdir = None  # as TMPDIR says there
    sys.path[:] = request["path"]
    if request["nested"]:
        os.environ[SERVER] = server
        subprocess.Popen = NestedWarm
    shown = [
        os.environ.get(TAG, ""),
        *(f"{name}={value}" for name, value in os.environ.items() if _is_tag(name)),
    ]
    text = "\0".join(shown).encode() + b"\0"
    assert len(text) < len(_NO_TAG)
    ctypes.memmove(tag, text, len(text))
    os.chdir(request["directory"])
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(threads))


def _run_and_exit(request: dict[str, Any]) -> NoReturn:
    """Run the program, and end the process without taking the interpreter apart."""
    code = 0
    try:
        _run(request["command"], _added(request["environment"]))
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


def _is_tag(name: str) -> bool:
    """Return whether processes are known by a variable, as those of ``nothing_left`` are by theirs."""
    return name.endswith("_TAG") and name != TAG


def _move(files: list[int], places: list[int]) -> None:
    """Give open files the numbers that the program shall find them at."""
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, max(places) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, place in zip(apart, places, strict=True):
        os.dup2(file, place)
        os.close(file)


def _run(command: list[str], added: list[str]) -> None:
    """Run what an interpreter would with these arguments."""
    if command[0] == "-u":
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115, for all its life
            setattr(sys, name, io.TextIOWrapper(cast(BinaryIO, raw), write_through=True))
        command = command[1:]
    if command[0] == "-m":
        sys.path[:] = [os.getcwd(), *added, *sys.path]
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if command[0] == "-c":
        folder, name, text = "", "<string>", command[1]
        sys.argv = ["-c", *command[2:]]
    else:
        folder, name = os.path.dirname(os.path.realpath(command[0])), command[0]
        main.__file__ = name
        with tokenize.open(name) as file:
            text = file.read()
        sys.argv = command
    sys.path[:] = [folder, *added, *sys.path]
    exec(compile(text, name, "exec"), vars(main))


def _added(environment: dict[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH that a program would have besides."""
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
