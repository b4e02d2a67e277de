"""A group that cannot come about: whoever waits in it is told at once, and why; other PID namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
import worlds
from torchestra.engine.membership import joining
from torchestra.engine.memory import fd_passing
from torchestra.engine.multihost import host_discovery
from torchestra.errors import DistBackendError, GroupAbortedError, RankFailedError
from torchestra.process_group import starting
from torchestra.store import Store

NEW_PID_NAMESPACE = 0x2000_0000


def enter(store: Store, rank: int, size: int, culprit: int, spoil: Callable[[], Any]) -> None:
    backend = spoil() if rank == culprit else None
    if isinstance(backend, bytes):
        store.secret, backend = backend, None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=worlds.OP_SECONDS)


def run_spoiled(culprit: int, spoil: Callable[[], Any]) -> list[worlds.Outcome]:
    return worlds.outcomes("processes", 3, enter, culprit, spoil, init=False)


def die_attaching() -> None:
    joining.Arena.attach = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def die_in_place() -> None:
    joining._first_barrier = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("spoil", [die_attaching, die_in_place])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_death_before_all_have_come_is_told_at_once(culprit: int, spoil: Callable[[], Any]) -> None:
    if (culprit, spoil) == (0, die_attaching):
        pytest.skip("rank 0 makes the arena")
    for rank, outcome in enumerate(run_spoiled(culprit, spoil)):
        if rank != culprit:
            assert isinstance(outcome.error, RankFailedError), outcome
            assert outcome.error.ranks == (culprit,)


def die_between_segment_and_arena() -> None:
    def die(*_: Any, **__: Any) -> None:
        worlds.leave_note("found")
        os.kill(os.getpid(), signal.SIGKILL)

    starting.join = die


def enter_by_segment(store: Store, rank: int, size: int, culprit: int, first: bool) -> None:
    os.environ["TORCHESTRA_HOST_ID"] = "one host"  # the ranks find out that they share it
    if rank == culprit:
        die_between_segment_and_arena()
    elif not first:  # when the culprit has died
        join = starting.join

        def join_later(*args: Any, **options: Any) -> Any:
            worlds.await_note("found")
            return join(*args, **options)

        starting.join = join_later
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=worlds.OP_SECONDS)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_death_after_the_hosts_were_found_is_told_at_once(culprit: int, first: bool) -> None:
    outcomes = worlds.outcomes("processes", 3, enter_by_segment, culprit, first, init=False)
    for rank, outcome in enumerate(outcomes):
        if rank != culprit:
            assert isinstance(outcome.error, RankFailedError), outcome
            assert outcome.error.ranks == (culprit,)
            assert f"rank {culprit} died before all ranks of the group had come" in outcome.message


def enter_when_rank_0_has_ended(
    store: Store, rank: int, size: int, hosts_are_found: bool, has_the_invitation: bool
) -> tuple[int, ...]:
    """Rank 2 dies on its way into the group; rank 1 looks for the others when rank 0 has given up."""
    if hosts_are_found:
        os.environ["TORCHESTRA_HOST_ID"] = "one host"
    if rank == 2:

        def die_later(*_: Any) -> None:
            worlds.await_note("on its way")
            os.kill(os.getpid(), signal.SIGKILL)

        joining.Arena.attach = die_later
    elif rank == 1:
        module, function = (joining, "request_descriptor") if has_the_invitation else (starting, "join")
        real = getattr(module, function)

        def later(*args: Any, **options: Any) -> Any:
            worlds.leave_note("on its way")
            worlds.await_note("rank 0 has ended")
            return real(*args, **options)

        setattr(module, function, later)
    with pytest.raises(RankFailedError) as caught:
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=worlds.OP_SECONDS)
    return caught.value.ranks


@pytest.mark.parametrize("has_the_invitation", [False, True])
@pytest.mark.parametrize("hosts_are_found", [False, True])
def test_a_late_rank_is_told_who_died_and_not_who_gave_up(
    hosts_are_found: bool, has_the_invitation: bool
) -> None:
    arguments = (hosts_are_found, has_the_invitation)
    with worlds.processes(3, enter_when_rank_0_has_ended, *arguments, init=False) as world:
        assert world.wait(0).result() == (2,)
        open(world.path("rank 0 has ended"), "w").close()
        assert world.wait(1).result() == (2,)


def fail_attaching() -> None:
    def refuse(*_: object) -> None:
        raise DistBackendError("another version")

    joining.Arena.attach = refuse
    joining.Arena.create = refuse


def have_another_secret() -> bytes:
    return b"another"


def be_a_thread() -> str:
    return "threads"


def leave_descriptors(number: int) -> tuple[int, int]:
    """Let this process open so many files more, and no others; the limits before."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 100, limits[1]))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for descriptor in taken[-number:]:
        os.close(descriptor)
    return limits


def have_no_descriptors() -> None:
    leave_descriptors(3)


FAILURES = {
    fail_attaching: "another version",
    have_another_secret: "secret",
    be_a_thread: "is a thread",
    have_no_descriptors: "as many files open as it may",
}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("spoil", FAILURES)
def test_why_a_rank_cannot_enter_is_told_the_others(culprit: int, spoil: Callable[[], Any]) -> None:
    outcomes = run_spoiled(culprit, spoil)
    if culprit == 0 and spoil in (have_another_secret, be_a_thread):
        # It is the others who notice, and one of them who says so first.
        assert isinstance(outcomes[0].error, GroupAbortedError), outcomes[0]
        assert "rank 1 could not enter it" in outcomes[0].message or "rank 2" in outcomes[0].message
        return
    assert FAILURES[spoil] in outcomes[culprit].message
    for rank, outcome in enumerate(outcomes):
        if rank != culprit:
            assert isinstance(outcome.error, GroupAbortedError), outcome
            assert f"rank {culprit} could not enter it" in outcome.message
            assert FAILURES[spoil] in outcome.message


def enter_segment(
    store: Store, rank: int, size: int, spoil: Callable[[], Any]
) -> tuple[str, tuple[int, ...]]:
    if rank == 0:
        lead = host_discovery._HostSegment.lead

        def lead_and_say_so(segment: host_discovery._HostSegment) -> Any:
            worlds.leave_note("leads")
            return lead(segment)

        host_discovery._HostSegment.lead = lead_and_say_so
    else:
        worlds.await_note("leads" if rank == 2 else "told")
    if rank == 2:
        spoil()
    try:
        host_discovery.find_hosts(store, rank, size, "group", worlds.OP_SECONDS)
    except GroupAbortedError as error:
        worlds.leave_note("told")
        return str(error), getattr(error, "ranks", ())
    except DistBackendError as error:
        return str(error), ()
    raise AssertionError("the ranks have met")


def die_in_segment() -> None:
    host_discovery.await_end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def fail_before_segment() -> None:
    def refuse(*_: object) -> None:
        raise DistBackendError("another version")

    host_discovery.request_descriptor = refuse


@pytest.mark.parametrize("spoil", [die_in_segment, fail_before_segment])
def test_ranks_that_look_for_their_hosts_hear_of_one_that_will_not_come(spoil: Callable[[], Any]) -> None:
    zero, one, _ = worlds.outcomes("processes", 3, enter_segment, spoil, init=False)
    for outcome in (zero, one):
        message, ranks = outcome.result()
        if spoil is die_in_segment:
            assert ranks == (2,)
            assert "rank 2 died before all ranks had come" in message
        else:
            assert "rank 2 could not enter it: DistBackendError: another version" in message


def make_groups_until_refused(limit: int) -> tuple[int, str]:
    dist.all_reduce(torch.ones(1))
    limits = leave_descriptors(limit)
    made = 0
    try:
        while made < 2 * limit:
            dist.new_group()
            made += 1
    except (DistBackendError, GroupAbortedError) as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    dist.barrier()
    dist.new_group()
    return made, told


def test_a_group_takes_one_descriptor_whatever_its_size_and_all_hear_when_there_are_none() -> None:
    told = worlds.run("processes", 4, make_groups_until_refused, 30)
    assert all(made >= 20 for made, _ in told), told
    assert all("as many files open as it may (ulimit -n: " in message for _, message in told), told


def receive_without_room() -> str:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.settimeout(1.0)
    socket.send_fds(there, [b"given"], [0])
    limits = leave_descriptors(1)
    spare = os.dup(0)
    try:
        fd_passing._packet(here)
    except OSError as error:
        return str(error)
    finally:
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return "was not noticed"


def test_a_descriptor_that_finds_no_room_is_an_error_that_says_so() -> None:
    assert "Too many open files" in worlds.run("processes", 1, receive_without_room)[0]


def unshare() -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(NEW_PID_NAMESPACE) == 0


def live_apart(store: Store, rank: int, size: int) -> object:
    if rank == 0:
        return take_part(store, rank, size)
    if not unshare():
        return "not permitted"
    pid = os.fork()  # process 1 of the new namespace
    if pid == 0:
        try:
            take_part(store, rank, size)
        finally:
            os._exit(1)
    worlds.await_note("met")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def take_part(store: Store, rank: int, size: int) -> object:
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=worlds.OP_SECONDS)
    peers = dist.group.WORLD.communicator.engine.context.peers
    assert peers is not None
    found = []
    for _ in range(3):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        found.append((tensor.item(), peers.dead()))
    assert found == [(2.0, ())] * 3, found
    if rank == 1:
        signal.pause()
    worlds.leave_note("met")
    with pytest.raises(RankFailedError, match="process 1 of another PID namespace is gone") as caught:
        dist.barrier()
    return caught.value.ranks


def may_unshare() -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(not unshare())
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(not may_unshare(), reason="no PID namespace may be made")
def test_ranks_in_pid_namespaces_of_their_own_see_each_other_live_and_die() -> None:
    assert worlds.run("processes", 2, live_apart, init=False, fresh=True)[0] == (1,)
