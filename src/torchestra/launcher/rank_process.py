"""A rank from the fork to its end: its environment, the user's code, its report of a failure, the exit.

The rank ends in ``os._exit`` after doing what the interpreter does at its end (join threads, run exit
handlers, destroy the program's objects, flush files). A whole ``Py_Finalize`` would destroy torch's
objects one by one, which in a forked process copies nearly all of their pages: 0.6 s per rank, measured.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from functools import partial
from typing import NoReturn

from torchestra.launcher.channel import anonymous_file, send
from torchestra.launcher.main_script import run_script
from torchestra.launcher.pickling import dump_exception, dump_result, load_call
from torchestra.launcher.root_cause import failure_from, user_traceback
from torchestra.launcher.spec import Call, Failure, JobSpec, PhaseReached, Returned
from torchestra.system.phases import Phase, report_to

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP})
"""The signals that a rank can get from its launcher; the fork server itself does not react to them."""


def run(spec: JobSpec, rank: int, files: list[int]) -> NoReturn:
    """Run rank ``rank`` of the job in a process just forked; never return.

    Args:
        rank: which of the job's ranks on this host this process is.
        files: descriptors of the control channel, stdin, stdout and stderr.
    """
    control = socket.socket(fileno=files[0])
    _take_standard_files(files[1:])
    _take_environment(spec, rank)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    report_to(partial(_report_phase, control, os.getpid()))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = _run_target(spec, control)
    except SystemExit as end:
        code = _exit_code(end)
        if code != 0:
            send(control, Failure(time.monotonic(), code, f"SystemExit: {end.code}", ""))
    except BaseException as error:
        code = _report(error, control)
    _end(code)


def _report_phase(control: socket.socket, pid: int, phase: Phase) -> None:
    """Tell the launcher which phase this rank has reached; a process that the rank forks has none."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            send(control, PhaseReached(phase, time.monotonic()))


def _take_standard_files(files: list[int]) -> None:
    for fd, descriptor in enumerate(files):
        os.dup2(descriptor, fd)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _take_environment(spec: JobSpec, rank: int) -> None:
    own = {"RANK": str(spec.first_rank + rank), "LOCAL_RANK": str(spec.first_local_rank + rank)}
    if spec.joins:
        own.update(TORCHESTRA_JOIN="1", TORCHESTRA_MEMBER=own["RANK"])
    environment = {**spec.environment, **own}
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if os.getcwd() != spec.directory:
        os.chdir(spec.directory)
    if spec.search_path is not None:
        sys.path[:] = spec.search_path

    import numpy as np
    import torch

    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    # Ranks started as separate processes would not draw the same "random" numbers either.
    np.random.seed()


def _run_target(spec: JobSpec, control: socket.socket) -> int:
    if not isinstance(spec.target, Call):
        run_script(spec.target)
        return 0
    function, arguments = load_call(spec.target)
    result = function(*arguments)
    with anonymous_file() as file:
        dump_result(result, file)
        file.flush()
        send(control, Returned(), [file.fileno()])
    return 0


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of ``sys.exit(...)``: a number as it is; anything else is printed."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _report(error: BaseException, control: socket.socket) -> int:
    """Tell the launcher which exception ends this rank, before any of the rank's state is torn down."""
    error.__traceback__ = user_traceback(error.__traceback__)
    failure = failure_from(error, dump_exception(error))
    with contextlib.suppress(OSError):
        send(control, failure)
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, error.__traceback__)
    return failure.exit_code


def _end(code: int) -> NoReturn:
    """Exit as the interpreter would, but without destroying the loaded modules."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if threading.active_count() == 1:
            sys.modules["__main__"].__dict__.clear()
            gc.collect()
        _flush_open_files()
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = code or 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _flush_open_files() -> None:
    """Flush Python's files, including those that only a cycle or a module still holds, and C's."""
    writers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for thing in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(thing), writers):
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
    ctypes.CDLL(None).fflush(None)
