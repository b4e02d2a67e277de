"""``torchestra doctor``: the features of this machine that torchestra depends on."""

from __future__ import annotations

import argparse
import ast
import ctypes
import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from torchestra.errors import DistBackendError, DistError
from torchestra.launcher.cores import usable_cores
from torchestra.store.secret import SECRET_VARIABLE, job_secret
from torchestra.store.tcp.locality import peer_user
from torchestra.system.cache_directories import choose
from torchestra.system.memory_files import SHARED_MEMORY, is_sealable, make_memory_file
from torchestra.system.switch import SWITCH_VARIABLE, switched_backend
from torchestra.system.terminal import wide_console

_PACKAGES = ("torchestra", "torch", "llvmlite", "numpy")
_FEW_FILES = 1024
_SHORT_SECRET = 16
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_WRONG = "wrong"
_GIB = 1 << 30
_PROBED_BYTES, _PART_BYTES, _TURNS = 1 << 20, 1 << 17, 5


class CheckResult(NamedTuple):
    """The result of one check: the finding, and a remark if it is not as it should be."""

    subject: str
    found: str
    remark: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--compile",
        action="store_true",
        help="first compile the kernels for this machine's processor and keep them, say in an image",
    )


def main(options: argparse.Namespace) -> int:
    """Print the results; return 1 if something prevents torchestra from working, else 0."""
    from rich.table import Table

    if _switch().found == _WRONG:
        os.environ[_AUTOLOAD] = "0"  # else `import torch` raises what the row tells
    if options.compile:
        from torchestra.engine import compile_kernels

        compile_kernels()
    results = [*examine(), _entries(), _gradients()]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "found", "remark"):
        table.add_column(title, overflow="fold")
    for result in results:
        table.add_row(result.subject, result.found, f"[yellow]{result.remark}[/]" if result.remark else "")
    wide_console().print(table)
    return 1 if any(result.found in ("missing", _WRONG) for result in results) else 0


def examine() -> Iterator[CheckResult]:
    """Check the machine, without importing torch."""
    yield CheckResult("python", f"{platform.python_version()} ({sys.executable})")
    for package in _PACKAGES:
        yield CheckResult(package, _version(package))
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield CheckResult(
        "system", system, "" if sys.byteorder == "little" else "big-endian: torchestra cannot run"
    )
    yield _cores()
    yield _memory()
    yield _memory_files()
    yield _supported("futex", _has_futex, "waiting ranks would not sleep")
    yield _supported("file locks", _has_file_locks, "ranks that are processes would take each other for dead")
    yield _supported(
        "pidfd", _has_pidfd, "the launcher polls for ends of ranks; peers cannot always say how one ended"
    )
    yield _single_copy()
    yield _open_files()
    yield _secret()
    yield _switch()
    yield _supported(
        "users of connections", _knows_users, "without a secret, other users of this host may join"
    )
    yield _kernels()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed" if package == "torchestra" else "missing"


def _cores() -> CheckResult:
    present, usable = os.cpu_count() or 1, usable_cores()
    remark = "the affinity mask or the container's quota holds some back" if usable < present else ""
    return CheckResult("cores", f"{usable} usable of {present}", remark)


def _memory() -> CheckResult:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    remark = f"limited to {limit / _GIB:.1f} GiB per process" if limit != resource.RLIM_INFINITY else ""
    return CheckResult("memory", f"{total / _GIB:.1f} GiB", remark)


def _memory_files() -> CheckResult:
    try:
        descriptor = make_memory_file("torchestra-doctor")
    except DistBackendError as error:
        return CheckResult("memory files", "missing", f"ranks cannot share memory: {error}")
    try:
        if is_sealable(descriptor):
            return CheckResult("memory files", "memfd_create")
    finally:
        os.close(descriptor)
    stats = os.statvfs(SHARED_MEMORY)
    free = stats.f_bavail * stats.f_frsize / _GIB
    return CheckResult(
        "memory files",
        f"no memfd_create; {SHARED_MEMORY} with {free:.1f} GiB in its place",
        "a group of 8 ranks takes 60 MiB of it, and its dist.empty() tensors; `torchestra top` sees no jobs",
    )


def _has_file_locks() -> bool:
    """Return whether a process sees another's lock on a memory file."""
    try:
        descriptor = make_memory_file("torchestra-doctor")
    except DistBackendError:
        return False
    with open(descriptor, "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        pid = os.fork()
        if pid == 0:
            refused = False
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError:
                refused = True
            os._exit(refused)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def _supported(subject: str, probe: Callable[[], bool], without: str) -> CheckResult:
    return CheckResult(subject, "yes") if probe() else CheckResult(subject, "no", without)


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _has_futex() -> bool:
    """Return whether a FUTEX_WAKE without waiters succeeds."""
    number = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
    word = ctypes.c_uint32(0)
    futex_wake = 1
    return number is not None and ctypes.CDLL(None).syscall(number, ctypes.byref(word), futex_wake, 1, 0) == 0


def _single_copy() -> CheckResult:
    """Check whether ranks may read each other's tensors where they lie, and whether that is faster."""
    without = "all_to_all, scatter, and all_gather of two ranks copy long tensors twice"
    times = _times_of_copies()
    if times is None:
        return CheckResult("single copy", "no", f"{without}: the system refuses process_vm_readv")
    read_s, copies_s = times
    told = f"1 MiB takes {read_s * 1e6:.0f} µs, two copies {copies_s * 1e6:.0f} µs"
    # As ranks decide (engine/kernels/single_copy.py): among them a copy takes a quarter more than here.
    return (
        CheckResult("single copy", f"yes: {told}")
        if 4 * read_s < 5 * copies_s
        else CheckResult("single copy", f"slower: {told}", without)
    )


def _times_of_copies() -> tuple[float, float] | None:
    """Return the seconds in which a process reads a tensor, or copies it twice; None: not a sibling's."""
    word = ctypes.c_int64(1)
    until_over, over = os.pipe()
    if (sibling := os.fork()) == 0:
        os.close(over)
        os.read(until_over, 1)
        os._exit(0)
    os.close(until_over)
    result, told = os.pipe()
    if (reader := os.fork()) == 0:
        try:
            if _read_process(sibling, ctypes.addressof(word), ctypes.addressof(word), 8) == 8:
                os.write(told, repr(_time_copies()).encode())
        finally:
            os._exit(0)
    os.close(told)
    with open(result, "rb") as file:
        text = file.read()
    os.close(over)
    for pid in (reader, sibling):
        os.waitpid(pid, 0)
    if not text:
        return None
    read_s, copies_s = ast.literal_eval(text.decode())
    return read_s, copies_s


def _time_copies() -> tuple[float, float]:
    """Return the shortest of some times of both ways within this process, by which ranks decide."""
    memory = ctypes.create_string_buffer(2 * _PROBED_BYTES + _PART_BYTES)
    source = ctypes.addressof(memory)
    ctypes.memset(source, 1, len(memory))
    target, reads, copies = source + _PROBED_BYTES, [], []
    buffer = target + _PROBED_BYTES
    for _ in range(_TURNS):
        began = time.perf_counter()
        for offset in range(0, _PROBED_BYTES, _PART_BYTES):
            ctypes.memmove(buffer, source + offset, _PART_BYTES)
            ctypes.memmove(target + offset, buffer, _PART_BYTES)
        between = time.perf_counter()
        _read_process(os.getpid(), target, source, _PROBED_BYTES)
        reads.append(time.perf_counter() - between)
        copies.append(between - began)
    return min(reads), min(copies)


def _read_process(pid: int, target: int, source: int, length: int) -> int:
    """Copy another process's memory; return how many bytes that were, or -1."""
    local, remote = (ctypes.c_size_t * 2)(target, length), (ctypes.c_size_t * 2)(source, length)
    return int(_process_vm_readv()(pid, local, 1, remote, 1, 0))


@cache
def _process_vm_readv() -> Any:
    call = ctypes.CDLL(None).process_vm_readv
    call.restype = ctypes.c_ssize_t
    return call


def _open_files() -> CheckResult:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remark = "a rank needs one for each group; ulimit -n raises it" if limit <= _FEW_FILES else ""
    return CheckResult("open files", f"{limit} per process", remark)


def _entries() -> CheckResult:
    """Check how torchestra reads torch's tensors; imports torch."""
    from torchestra.engine.entries.tensor_access import why_not

    missing = why_not()
    remark = f"small operations take some 2 µs longer: {missing}" if missing else ""
    return CheckResult("native entries", "no" if missing else "yes", remark)


def _gradients() -> CheckResult:
    """Check whether gradients can be born in memory that ranks share; imports torch."""
    from torchestra.engine.memory.torch_allocator import why_not

    missing = why_not()
    remark = f"DistributedDataParallel copies large gradients: {missing}" if missing else ""
    return CheckResult("shared gradients", "no" if missing else "yes", remark)


def _secret() -> CheckResult:
    secret = job_secret(None)
    if secret is None:
        return CheckResult(
            "secret", f"{SECRET_VARIABLE} is not set: one host, one user; torchestra run makes one"
        )
    remark = "can be guessed; take `openssl rand -hex 32`" if len(secret) < _SHORT_SECRET else ""
    return CheckResult("secret", f"{SECRET_VARIABLE} is set, {len(secret)} bytes", remark)


def _switch() -> CheckResult:
    """Check the setting of what ``import torch`` does for programs that use torch.distributed."""
    subject = "torch.distributed"
    try:
        backend = switched_backend()
    except DistError as error:
        return CheckResult(subject, _WRONG, str(error))
    if backend is None:
        return CheckResult(
            subject, f'backend "torchestra"; {SWITCH_VARIABLE}=gloo would have it serve "gloo" too'
        )
    found = f'"{backend}" is served by torchestra ({SWITCH_VARIABLE}={backend})'
    if os.environ.get(_AUTOLOAD, "1") == "0":
        return CheckResult(subject, found, f"not with {_AUTOLOAD}=0; run python -m torchestra.interop SCRIPT")
    if not any(each.value.startswith("torchestra.") for each in _torch_backends()):
        return CheckResult(
            subject, found, "not as torchestra is installed here; run python -m torchestra.interop SCRIPT"
        )
    return CheckResult(subject, found)


def _torch_backends() -> Sequence[importlib.metadata.EntryPoint]:
    return tuple(importlib.metadata.entry_points(group="torch.backends"))


def _knows_users() -> bool:
    """Return whether the kernel tells which user has the other end of a connection within this host."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as end,
        listener.accept()[0],
    ):
        return peer_user(end) == os.geteuid()


def _kernels() -> CheckResult:
    from torchestra.engine.native.object_files import directory_of, object_name, prebuilt_level

    directory, refused = choose()
    remarks = [f"not used: {each}" for each in refused]
    if found := directory_of(object_name()):
        return CheckResult("kernels", f"compiled, in {found}", "; ".join(remarks))
    if level := prebuilt_level():
        return CheckResult("kernels", f"of the wheel, for {level} processors", "; ".join(remarks))
    if directory is None:
        return CheckResult("kernels", "compiled by every process, in memory", "; ".join(remarks))
    remarks.append("the first run compiles them, or torchestra doctor --compile now")
    return CheckResult("kernels", f"to be compiled, into {directory.folder}", "; ".join(remarks))
