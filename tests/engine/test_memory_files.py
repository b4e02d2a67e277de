"""Where the system has no memfd_create, ranks share a file of /dev/shm that is unlinked at once."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

import torchestra as dist
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.multihost import host_discovery
from torchestra.errors import DistBackendError
from torchestra.monitor.doctor import examine
from torchestra.store import Store
from torchestra.system import memory_files
from worlds import KINDS, OP_SECONDS, run

SOON = 20.0


def refused(*_: object) -> int:
    raise PermissionError(errno.EPERM, "as a seccomp filter has it")


def share(store: Store | None = None, rank: int = -1, size: int = -1) -> tuple[float, float, float]:
    os.memfd_create = os.pidfd_open = refused
    if store is not None:
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=OP_SECONDS)
    else:
        dist.init_process_group(timeout=OP_SECONDS)
    large = dist.ones(1 << 20)
    dist.all_reduce(large)
    del large
    other = torch.ones(3)
    dist.all_reduce(other, group=dist.new_group())
    peers = dist.group.WORLD.communicator.engine.context.peers
    assert peers is not None
    assert peers.dead() == ()
    again = dist.ones(1 << 20)
    dist.all_reduce(again)
    return other[0].item(), again[0].item(), again.mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_a_file_of_dev_shm_instead(kind: str) -> None:
    before = set(os.listdir("/dev/shm"))
    create, open_pidfd = os.memfd_create, os.pidfd_open
    try:
        assert run(kind, 3, share, init=False, fresh=True) == [(3.0, 3.0, 3.0)] * 3
    finally:
        os.memfd_create, os.pidfd_open = create, open_pidfd
    deadline = time.monotonic() + SOON
    while left := {name for name in os.listdir("/dev/shm") if "torchestra" in name} - before:
        assert time.monotonic() < deadline, left  # another test's have a name for a moment
        time.sleep(0.01)


def test_such_a_file_is_private_and_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refused)
    descriptor = memory_files.make_memory_file("test")
    try:
        status = os.fstat(descriptor)
        assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
        assert os.get_inheritable(descriptor) is False
    finally:
        os.close(descriptor)


def test_a_dev_shm_that_is_full_or_missing_is_said_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "memfd_create", refused)
    arena, descriptor = Arena.create(layout_for(2), "group")
    os.close(descriptor)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DistBackendError, match=r"/dev/shm, which is used because this .* no room for the"):
        Arena.create(layout_for(2), "group")
    with pytest.raises(DistBackendError, match="no 4096 bytes are left for a tensor in /dev/shm"):
        arena.reserve_heap(0, 4096)
    monkeypatch.setattr(memory_files, "SHARED_MEMORY", str(tmp_path / "none"))
    with pytest.raises(
        DistBackendError, match=r"there is no memfd_create .*as a seccomp filter has it.* no file"
    ):
        memory_files.make_memory_file("test")


def test_ranks_that_look_for_their_host_say_so_too() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(DistBackendError, match=r"which is used because this .* has no room for what"):
            host_discovery._write(descriptor, b"1", 0)
    finally:
        os.close(descriptor)


def test_a_memory_file_is_sealed_and_not_executable_where_the_system_can() -> None:
    descriptor = memory_files.make_memory_file("test")
    try:
        assert memory_files.is_sealable(descriptor)
        f_seal_exec = 0x20
        knows = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 3)
        assert memory_files.is_sealed(descriptor, f_seal_exec) == knows
    finally:
        os.close(descriptor)


def test_the_doctor_says_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(subject: str) -> tuple[str, str]:
        (finding,) = [finding for finding in examine() if finding.subject == subject]
        return finding.found, finding.remark

    assert found("memory files") == ("memfd_create", "")
    assert found("file locks") == ("yes", "")
    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(os, "pidfd_open", refused)
    assert found("memory files")[0].startswith("no memfd_create; /dev/shm with ")
    assert found("file locks") == ("yes", "")
    assert found("pidfd")[0] == "no"
