"""The object file of the kernels: whose is read, how it is written, who compiles it, that none is needed."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding
import pytest

import torchestra.engine
from torchestra.engine.native import object_files
from torchestra.engine.native.object_files import find, find_or_make
from torchestra.engine.native.target import LEVELS, Target
from torchestra.system import cache_directories
from torchestra.system.cache_directories import Directory, prepare

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
CONTENTS = b"machine code"


class Compiler:
    """Compiles, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return CONTENTS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only directory for object files, in a directory of the test's own."""
    directory = Directory(tmp_path / "cache", "the test")
    assert not prepare(directory.folder)
    for module in (object_files, cache_directories):
        monkeypatch.setattr(module, "candidates", lambda: iter([directory]))
    monkeypatch.setattr(object_files, "PREBUILT", tmp_path / "none")
    yield directory.folder
    object_files.say_once.cache_clear()


def is_compiled() -> bool:
    """Return whether a process that comes now compiles."""
    compiler = Compiler()
    assert find_or_make(compiler) == CONTENTS
    return compiler.calls == 1


def test_it_is_compiled_once_and_for_this_user_alone_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert is_compiled()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert not is_compiled()


@pytest.mark.parametrize(
    "how", ["others can write it", pytest.param("another's", marks=AS_ROOT), "a link", "a pipe"]
)
def test_a_file_that_others_may_have_written_is_not_read(folder: Path, tmp_path: Path, how: str) -> None:
    assert is_compiled()
    (path,) = folder.glob("*.o")
    poison = tmp_path / "poison"
    poison.write_bytes(path.read_bytes())
    if how in ("a link", "a pipe"):
        path.unlink()
        path.symlink_to(poison) if how == "a link" else os.mkfifo(path, 0o600)
    elif how == "another's":
        os.chown(path, 4711, 4711)
    else:
        path.chmod(0o666)
    assert is_compiled()
    assert not is_compiled(), "it has been replaced"


def test_what_a_folder_of_others_holds_is_not_read(folder: Path) -> None:
    assert is_compiled()
    folder.chmod(0o777)
    assert find(object_files.object_name()) is None


@pytest.mark.parametrize("length", [0, 10, 33, -1])
def test_half_a_file_is_compiled_anew(folder: Path, length: int) -> None:
    assert is_compiled()
    (path,) = folder.glob("*.o")
    path.write_bytes(path.read_bytes()[:length])
    assert is_compiled()
    assert not is_compiled()


def test_other_sources_are_compiled_anew_and_the_old_object_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_compiled()
    other_processor = folder / f"{object_files._stem()}0123456789abcdef.o"
    other_processor.touch()
    monkeypatch.setattr(object_files, "sources_digest", lambda: "other")
    assert is_compiled()
    assert [path.name.split("-")[2] for path in folder.glob("*.o")] == ["other"]


def test_what_is_compiled_of_sources_that_have_changed_since_their_import_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be made of old constants and new functions, under the name of the new ones."""
    with monkeypatch.context() as patched:
        patched.setattr(object_files, "_IMPORTED", 0.0)
        assert is_compiled()
    assert not list(folder.glob("*.o"))
    assert is_compiled()
    assert not is_compiled()


def test_hosts_with_other_processors_share_a_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled()
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: "another")
    assert is_compiled()
    assert len(list(folder.glob("*.o"))) == 2


def test_a_full_disk_is_told_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    assert is_compiled()
    assert is_compiled()
    said = capfd.readouterr().err
    assert said.count(f"cannot be kept in {folder} (No space left on device)") == 1
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_without_a_directory_kernels_are_compiled_in_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_files, "candidates", lambda: iter([]))
    monkeypatch.setattr(object_files, "choose", lambda: (None, ["/x: Read-only file system"]))
    try:
        assert is_compiled()
    finally:
        object_files.say_once.cache_clear()
    said = capfd.readouterr().err
    assert "compiles them in memory" in said
    assert "/x: Read-only file system" in said


def test_an_object_in_a_directory_that_cannot_be_written_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is prepared by root, and used by anybody."""
    assert is_compiled()
    monkeypatch.setattr(object_files, "choose", lambda: pytest.fail("looked for a directory to write"))
    assert not is_compiled()


def test_the_best_object_of_the_wheel_that_the_processor_runs_is_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "PREBUILT", tmp_path / "objects")
    for level in LEVELS:
        object_files.keep_prebuilt(level, level.encode())
    host = LEVELS["x86-64-v3"]._replace(cpu="skylake", features=f"+sse,{LEVELS['x86-64-v3'].features},+xyz")
    old, arm = host._replace(features="+sse,+avx"), LEVELS["aarch64"]._replace(features="+neon")
    for processor, level in ((host, "x86-64-v3"), (old, "x86-64"), (arm, "aarch64")):
        monkeypatch.setattr(Target, "host", lambda processor=processor: processor)
        assert object_files.prebuilt_level() == level
        assert find_or_make(pytest.fail) == level.encode()
    monkeypatch.setattr(Target, "host", lambda: host._replace(machine="riscv64"))
    assert is_compiled()
    monkeypatch.setattr(Target, "host", lambda: host)
    object_files.make(Compiler())
    assert not is_compiled(), "one for the very processor is preferred"
    with monkeypatch.context() as other:
        header = object.__basicsize__
        other.setattr(object_files, "_USUAL_HEADER", 0 if header == object_files._USUAL_HEADER else header)
        assert object_files.prebuilt_level() is None, "it reads objects whose headers have another length"
    monkeypatch.setattr(object_files, "sources_digest", lambda: "other")
    assert object_files.prebuilt_level() is None


def test_an_error_or_a_signal_in_the_midst_leaves_nothing_half_made(folder: Path) -> None:
    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_or_make(interrupted)
    assert not list(folder.glob("*.o"))
    assert is_compiled()


# -- the lock


@pytest.fixture
def held(folder: Path) -> Iterator[Path]:
    """The folder, while somebody compiles, or is stopped while he does."""
    lock = folder / "torchestra-kernels.lock"
    with open(lock, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write("4711 on another host")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def test_loading_takes_no_lock(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    object_files._write(held / object_files.object_name(), CONTENTS)
    monkeypatch.setattr(object_files, "_alone", lambda _: pytest.fail("asked for the lock"))
    assert not is_compiled()


def test_who_waits_takes_what_the_other_has_made(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = held / object_files.object_name()
    monkeypatch.setattr(object_files.time, "sleep", lambda _: object_files._write(path, CONTENTS))
    assert not is_compiled()


def test_who_waits_says_for_whom_and_compiles_at_last(
    held: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A compiler that was stopped does not stop the others."""
    monkeypatch.setattr(object_files, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(object_files, "_LOCK_SECONDS", 0.2)
    assert is_compiled()
    said = capfd.readouterr().err
    assert "waiting for process 4711 on another host" in said
    assert "compiling at the same time" in said


def test_the_lock_names_who_has_it_and_is_let_go_in_children_too(folder: Path) -> None:
    path = folder / "torchestra-kernels-x.o"
    with object_files._alone(path) as made:
        assert made is None
        (lock,) = folder.glob("*.lock")
        assert lock.read_text().startswith(f"{os.getpid()} on ")
        (descriptor,) = [int(each) for each in os.listdir("/proc/self/fd") if _leads_to(int(each), lock)]
        child = os.dup(descriptor)  # what a child that is forked now would have
    with open(lock) as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(child)


def _leads_to(descriptor: int, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False


# -- a process


_FIRST_ALL_REDUCE = """
import sys, torch
before = set(sys.modules)  # torch 2.10 imports pdb
import torchestra as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
added = sys.modules.keys() - before
heavy = [name for name in added if name.split(".")[0] in ("numba", "pdb", "sympy", "pandas")]
compilers = [name for name in added if name.startswith("torchestra.engine.native.compiler")]
print(heavy, compilers)
"""


def test_a_process_loads_its_kernels_without_a_compiler() -> None:
    """Importing what compiles would take longer than all the rest of the start."""
    torchestra.engine.warm_up()
    command = [sys.executable, "-c", _FIRST_ALL_REDUCE]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "[] []\n"


def test_a_big_endian_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="needs a little-endian processor"):
        importlib.reload(torchestra.engine)
