"""Workers that join and leave: who is there, who takes whose place, and what harms nobody."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

import torchestra as dist
import worlds
from torchestra import rpc
from torchestra.compat import rpc as compat_rpc
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import (
    RemoteReferenceError,
    RpcError,
    RpcTimeoutError,
    WorkerFailedError,
)
from torchestra.rpc import dynamic_group, joining, starting
from torchestra.rpc.agent import Agent
from torchestra.rpc.current import current_agent
from torchestra.rpc.dynamic_group import DynamicGroup
from torchestra.rpc.membership import MembershipLog, WorkerLeft
from torchestra.store import HashStore, PrefixStore
from torchestra.store.tcp.server import TCPStoreServer
from torchestra.transport.probing import ProbeResult, probe


def enter(name: str, rank: int, **options: Any) -> None:
    """On a rank of worlds.run: join the world's dynamic group."""
    if dist.get_backend() == "native":
        options.setdefault("init_method", f"file://{os.environ['WORLD_DIRECTORY']}/dynamic")
    else:
        options.setdefault("store", PrefixStore("dynamic", current_thread_rank().store))
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.RpcBackendOptions(**options))


def here() -> list[str]:
    return sorted(info.name for info in rpc.get_worker_infos())


def echo(value: Any) -> Any:
    return value


def await_workers(names: list[str]) -> None:
    deadline = time.monotonic() + worlds.WORLD_SECONDS
    while here() != names:
        assert time.monotonic() < deadline, (here(), names)
        time.sleep(0.005)


# -- joining and leaving


def join_one_after_another() -> None:
    rank = dist.get_rank()
    for newcomer in range(3):
        if rank == newcomer:
            enter(f"worker{rank}", rank)
            assert here() == [f"worker{each}" for each in range(rank + 1)]
            assert [rpc.rpc_sync(f"worker{peer}", echo, (peer,)) for peer in range(rank)] == list(range(rank))
        dist.barrier()
        if rank < newcomer:
            assert rpc.rpc_sync(newcomer, echo, (torch.ones(1 << 16),)).sum() == 1 << 16
            assert rpc.get_worker_info(f"worker{newcomer}").id == newcomer
        dist.barrier()
    if rank == 1:
        rpc.shutdown()
    dist.barrier()
    if rank != 1:
        assert here() == ["worker0", "worker2"]  # at once: shutdown() has returned there
        with pytest.raises(WorkerFailedError, match=r"worker 'worker1' \(rank 1\) has shut down") as caught:
            rpc.rpc_sync("worker1", echo, (1,))
        assert caught.value.worker == "worker1"
        with pytest.raises(WorkerFailedError, match="worker 'worker1'"):
            rpc.rpc_sync(1, echo, (1,))
        with pytest.raises(RpcError, match="could not find destination worker 'worker7'"):
            rpc.rpc_sync("worker7", echo, (1,))
    dist.barrier()
    if rank == 1:
        enter("worker1", 1)
        assert current_agent().number == 3
    dist.barrier()
    for peer in range(3):
        assert rpc.rpc_sync(f"worker{peer}", echo, (peer,)) == peer
    dist.barrier()
    rpc.shutdown()


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_workers_join_leave_and_come_back_and_all_know_it_at_once(kind: str) -> None:
    worlds.run(kind, 3, join_one_after_another)


def come_and_go(seed: int) -> None:
    rank, dice = dist.get_rank(), random.Random(seed)
    for _ in range(4):
        enter(f"worker{rank}", rank)
        for _ in range(3):
            peer = dice.choice(here())
            try:
                assert rpc.rpc_sync(peer, echo, (rank,)) == rank
                assert rpc.remote(peer, echo, (rank,)).to_here() == rank
            except (WorkerFailedError, RemoteReferenceError):
                assert peer != f"worker{rank}"
        rpc.shutdown(graceful=dice.random() < 0.7)
    dist.barrier()


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_any_number_join_and_leave_at_any_moment(kind: str) -> None:
    worlds.run(kind, 4, come_and_go, 7)


def take_one_name(winners: list[int]) -> None:
    with contextlib.suppress(RpcError):
        enter("only", dist.get_rank())
        winners.append(dist.get_rank())
    dist.barrier()
    if winners == [dist.get_rank()]:
        assert here() == ["only"]
        rpc.shutdown()


def test_of_workers_that_come_at_once_with_one_name_one_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_group, "_DETECTION_SECONDS", 0.1)
    winners: list[int] = []
    worlds.run("threads", 5, take_one_name, winners)
    assert len(winners) == 1


def take_one_rank() -> None:
    if dist.get_rank() == 0:
        enter("first", 5)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(RpcError, match=r"rank 5 is taken by worker 'first', which is process .* lives"):
            enter("second", 5)
        assert compat_rpc._is_current_rpc_agent_set() is False
    dist.barrier()
    if dist.get_rank() == 0:
        assert here() == ["first"]
        rpc.shutdown()


def test_a_rank_that_lives_is_not_taken() -> None:
    worlds.run("threads", 2, take_one_rank)


# -- calls at the end


def wait_for(note: str) -> str:
    worlds.await_note(note)
    return note


def leave_while_called() -> None:
    rank = dist.get_rank()
    enter(f"worker{rank}", rank)
    dist.barrier()
    if rank == 0:
        future = rpc.rpc_async("worker1", wait_for, ("go",))
        worlds.leave_note("asked")
        worlds.await_note("leaving")
        await_workers(["worker0"])  # it answers no new call, but this one
        worlds.leave_note("go")
        assert future.wait() == "go"
    else:
        worlds.await_note("asked")
        threading.Thread(target=worlds.leave_note, args=("leaving",)).start()
    rpc.shutdown()


def test_a_worker_that_leaves_finishes_the_calls_to_it() -> None:
    worlds.run("processes", 2, leave_while_called)


_release = threading.Event()


def hold() -> bool:
    return _release.wait(worlds.WORLD_SECONDS)


def leave_with_a_call_pending() -> None:
    rank = dist.get_rank()
    enter(f"worker{rank}", rank)
    dist.barrier()
    if rank == 0:
        future = rpc.rpc_async("worker1", hold)
    dist.barrier()
    if rank == 1:
        with pytest.raises(RpcTimeoutError, match=r"'worker1' timed .* 'worker0' had not finished the calls"):
            rpc.shutdown(timeout=0.2)
        _release.set()
    else:
        with pytest.raises(WorkerFailedError, match="'worker1'"):
            future.wait()
        rpc.shutdown()


def test_a_departure_that_takes_too_long_says_for_whose_calls() -> None:
    _release.clear()
    worlds.run("threads", 2, leave_with_a_call_pending)


# -- death

_kept: list[rpc.RRef] = []


def keep(rref: rpc.RRef) -> None:
    _kept.append(rref)


def use_kept() -> Any:
    return _kept[0].to_here()


def use(rref: rpc.RRef) -> Any:
    return rref.to_here()


def meet_and_end(rank: int, others: list[int]) -> None:
    """Shut down when all have come here: there is no group of which all live."""
    worlds.leave_note(f"done{rank}")
    for other in others:
        worlds.await_note(f"done{other}")
    rpc.shutdown()


def lose_one_that_is_replaced() -> None:
    rank = dist.get_rank()
    if rank < 3:
        enter(f"worker{rank}", rank)
    dist.barrier()
    if rank == 0:
        see_the_end()
    elif rank == 1:
        worlds.await_note("replaced")
        assert rpc.rpc_sync("worker2", echo, (rank,)) == rank
    elif rank == 2:
        time.sleep(60)
    else:
        worlds.await_note("seen")
        enter("worker2", 2)
        assert current_agent().number == 3
        worlds.leave_note("replaced")
    meet_and_end(rank, [0, 1, 3])


def see_the_end() -> None:
    old = rpc.remote("worker2", echo, (5,))
    assert old.to_here() == 5
    rpc.rpc_sync("worker1", keep, (old,))
    future = rpc.rpc_async("worker2", time.sleep, (60,), timeout=0)
    worlds.leave_note("ready")
    with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died"):
        future.wait()
    await_workers(["worker0", "worker1"])
    with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died"):
        rpc.rpc_sync("worker2", echo, (1,))
    worlds.leave_note("seen")
    worlds.await_note("replaced")
    assert rpc.remote("worker2", echo, (6,)).to_here() == 6
    for ask in (old.to_here, old.rpc_sync().bit_length, lambda: rpc.rpc_sync("worker1", use_kept)):
        with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died"):
            ask()  # of the worker that has died, not of the one with its name
    with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died"):
        rpc.rpc_sync("worker2", use, (old,))  # which has never seen that one


def test_a_dead_worker_is_named_and_replaced_and_its_references_stay_lost() -> None:
    with worlds.processes(4, lose_one_that_is_replaced) as world:
        world.await_file("ready")
        world.signal(2, signal.SIGKILL)
        ended = world.finish()
    assert ended[2].exit_code == -signal.SIGKILL
    worlds.results([each for rank, each in enumerate(ended) if rank != 2])


def _kill_self(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


STEPS: dict[str, tuple[Any, str]] = {
    "before it is in the log": (MembershipLog, "append"),
    "in the log": (joining, "_new_agent"),
    "before it waits for the others": (DynamicGroup, "await_admitted"),
    "let in": (starting, "set_agent"),
}


def die_while_joining(step: str) -> None:
    rank = dist.get_rank()
    if rank == 0:
        enter("worker0", 0)
    dist.barrier()
    if rank == 1:
        setattr(*STEPS[step], _kill_self)
        enter("worker1", 1)
    if rank == 2:
        enter("worker2", 2)  # at the same moment
        assert rpc.rpc_sync("worker0", echo, (1,)) == 1
        rpc.shutdown()
        worlds.await_note("dead")
        enter("worker1", 1)
        worlds.leave_note("came")
    worlds.await_note("came")
    await_workers(["worker0", "worker1"])
    assert rpc.rpc_sync("worker0" if rank else "worker1", echo, (2,)) == 2
    meet_and_end(rank, [0, 2])


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_that_is_killed_while_it_joins_harms_nobody(step: str) -> None:
    with worlds.processes(3, die_while_joining, step) as world:
        assert world.wait(1).exit_code == -signal.SIGKILL
        with open(world.path("dead"), "w"):
            pass
        ended = world.finish()
    worlds.results([ended[0], ended[2]])


def call_for_long(name: str) -> None:
    deadline = time.monotonic() + worlds.WORLD_SECONDS
    while time.monotonic() < deadline:
        rpc.rpc_sync(name, echo, (1,))


def be_removed() -> None:
    rank = dist.get_rank()
    enter(f"worker{rank}", rank)
    dist.barrier()
    if rank == 0:
        mine = rpc.remote("worker1", echo, (1,))
        members = current_agent().router.members
        members.remove_lost(current_agent().workers.numbers["worker1"], "died (or so it seemed)")
        with pytest.raises(WorkerFailedError, match=r"'worker1' \(rank 1\) died \(or so it seemed\)"):
            mine.to_here()
        await_workers(["worker0"])
        rpc.shutdown()
    else:
        with pytest.raises(RpcError, match=r"'worker1' was removed from its group \(died \(or so it"):
            call_for_long("worker1")
        with pytest.raises(RpcError, match=r"'worker1' was removed from its group"):
            rpc.get_worker_infos()
        current_agent().workers.mark_gone(0)  # as where that was read together with the removal
        with pytest.raises(RpcError, match=r"'worker1' was removed from its group"):
            rpc.rpc_async("worker0", echo, (1,))
        rpc.shutdown(graceful=False)


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_a_worker_that_is_removed_though_it_lives_is_told(kind: str) -> None:
    worlds.run(kind, 2, be_removed)


# -- who may meet


def mix(first_size: int | None) -> None:
    rank = dist.get_rank()
    store = PrefixStore("mixed", current_thread_rank().store)
    options = rpc.RpcBackendOptions(store=store)
    if rank == 0:
        rpc.init_rpc("first", rank=0, world_size=first_size, rpc_backend_options=options)
    dist.barrier()
    if rank == 1:
        with pytest.raises(RpcError, match="mixes statically and dynamically initialized members"):
            rpc.init_rpc("second", rank=0, world_size=None if first_size else 1, rpc_backend_options=options)
    dist.barrier()
    if rank == 0:
        assert rpc.rpc_sync("first", echo, (1,)) == 1
        rpc.shutdown()


@pytest.mark.parametrize("first_size", [1, None], ids=["static first", "dynamic first"])
def test_groups_with_and_without_a_size_do_not_mix(first_size: int | None) -> None:
    worlds.run("threads", 2, mix, first_size)


def test_a_worker_that_is_removed_before_it_listens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start = DynamicGroup.start

    def start_when_removed(self: DynamicGroup, agent: Agent) -> None:
        self._append(WorkerLeft(self.number, "seemed to be gone"))
        start(self, agent)

    monkeypatch.setattr(DynamicGroup, "start", start_when_removed)
    with pytest.raises(RpcError, match="'worker0' was removed while it joined: seemed to be gone"):
        rpc.init_rpc("worker0", rank=0, rpc_backend_options=rpc.RpcBackendOptions(store=HashStore()))


def test_it_is_found_out_whether_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:
        address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
        assert probe(address) is ProbeResult.LISTENING
    assert probe(address) is ProbeResult.NOT_LISTENING
    assert probe("tcp://127.0.0.1:x") is probe("nonsense") is ProbeResult.UNKNOWN


def end_without_shutdown() -> None:
    rank = dist.get_rank()
    enter(f"worker{rank}", rank)
    dist.barrier()
    if rank == 0:
        await_workers(["worker0"])
        rpc.shutdown()


def test_a_thread_that_ends_without_shutdown_leaves() -> None:
    worlds.run("threads", 2, end_without_shutdown)
    deadline = time.monotonic() + 20
    while left := [each.name for each in threading.enumerate() if "worker" in each.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_without_its_store_a_group_goes_on() -> None:
    server = TCPStoreServer("127.0.0.1", 0)

    def two() -> None:
        rank = dist.get_rank()
        store = dist.TCPStore("127.0.0.1", server.port, timeout=30)
        enter(f"worker{rank}", rank, store=store)
        store.set_timeout(1)
        dist.barrier()
        if rank == 0:
            server.close()
        dist.barrier()
        assert rpc.rpc_sync(1 - rank, echo, (3,)) == 3
        dist.barrier()
        rpc.shutdown()

    worlds.run("threads", 2, two)
