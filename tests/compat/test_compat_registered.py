"""Groups of registered backends: each operation reaches the method that is meant, with torch's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchestra
import torchestra.compat as dist
from torchestra.compat import distributed_c10d as c10d
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank


class Done(dist._Work):
    """An operation that has ended when it is begun, of which its class says so."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def _source_rank(self) -> int:
        return 2


class Recording(dist.ProcessGroup):
    """Notes what is called, and answers as if this rank were alone."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[tuple[str, Any]] = []

    def getBackendName(self) -> str:
        return "Recording"

    def _note(self, name: str, *what: Any) -> Done:
        self.calls.append((name, what))
        return Done()

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:  # type: ignore[override]
        for tensor in tensors:
            tensor += 2
        return self._note("allreduce", len(tensors), opts.reduceOp)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Done:
        return self._note("allreduce_coalesced", len(tensors), opts.reduceOp)

    def broadcast(self, tensors: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("broadcast", len(tensors), opts.rootRank)

    def reduce(self, tensors: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("reduce", len(tensors), opts.reduceOp, opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("allgather", len(outputs), len(outputs[0]), len(inputs))

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("_allgather_base", output.numel(), tensor.numel())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("gather", len(outputs), len(inputs), opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("scatter", len(outputs), len(inputs), opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("reduce_scatter", len(outputs), len(inputs[0]), opts.reduceOp)

    def alltoall_base(self, *args: Any) -> Done:  # type: ignore[override]
        return self._note("alltoall_base", args[2], args[3])

    def barrier(self, opts: Any = None) -> Done:  # type: ignore[override]
        return self._note("barrier", opts.timeout)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Done:
        return self._note("send", len(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Done:
        return self._note("recv", len(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Done:
        return self._note("recv_anysource", len(tensors), tag)

    def abort(self) -> None:
        self._note("abort")

    def shutdown(self) -> None:
        self._note("shutdown")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(dist.Backend, "_plugins", dict(dist.Backend._plugins))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    capability = dict(dist.Backend.backend_capability)
    monkeypatch.setattr(dist.Backend, "backend_capability", capability)
    dist.Backend.register_backend("recording", lambda store, rank, size, timeout: Recording(rank, size))
    yield "recording"
    del dist.Backend.RECORDING  # type: ignore[attr-defined]


def opened(backend: str, **options: Any) -> Recording:
    """A default group, of one rank."""
    dist.init_process_group(backend, rank=0, world_size=1, store=HashStore(), **options)
    group = c10d._get_default_group()
    assert isinstance(group, Recording)
    return group


@pytest.fixture
def group(backend: str) -> Iterator[Recording]:
    """One of three ranks, in a world whose others do not exist."""
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("fake", rank=0, world_size=3, store=HashStore())
        made = dist.new_group(backend=backend)
        assert isinstance(made, Recording)
        yield made


_T = torch.zeros(2)
CALLS: list[tuple[Callable[[Recording], Any], str, tuple[Any, ...]]] = [
    (
        lambda g: dist.all_reduce(torch.zeros(2), dist.ReduceOp.MAX, g),
        "allreduce",
        (1, dist.ReduceOp.MAX),
    ),
    (
        lambda g: dist.all_reduce_coalesced([_T, _T], group=g),
        "allreduce_coalesced",
        (2, dist.ReduceOp.SUM),
    ),
    (lambda g: dist.broadcast(_T, 1, group=g), "broadcast", (1, 1)),
    (lambda g: dist.reduce(_T, 2, group=g), "reduce", (1, dist.ReduceOp.SUM, 2)),
    (lambda g: dist.all_gather([_T, _T, _T], _T, group=g), "allgather", (1, 3, 1)),
    (lambda g: dist.all_gather_into_tensor(torch.zeros(6), _T, g), "_allgather_base", (6, 2)),
    (lambda g: dist.gather(_T, [_T, _T, _T], group=g), "gather", (1, 1, 0)),
    (lambda g: dist.gather(_T, dst=1, group=g), "gather", (0, 1, 1)),
    (lambda g: dist.scatter(_T, src=1, group=g), "scatter", (1, 0, 1)),
    (lambda g: dist.reduce_scatter(_T, [_T, _T, _T], group=g), "reduce_scatter", (1, 3, dist.ReduceOp.SUM)),
    (lambda g: dist.all_to_all_single(torch.zeros(6), torch.zeros(6), group=g), "alltoall_base", ([], [])),
    (lambda g: dist.barrier(timeout=7, group=g), "barrier", (timedelta(seconds=7),)),
    (lambda g: dist.send(_T, 1, tag=5, group=g), "send", (1, 1, 5)),
    (lambda g: dist.recv(_T, 2, group=g), "recv", (1, 2, 0)),
]


def test_each_operation_reaches_its_method(group: Recording) -> None:
    for call, name, arguments in CALLS:
        call(group)
        assert group.calls.pop() == (name, arguments), name
    assert not group.calls
    assert dist.recv(torch.zeros(2), group=group) == 2
    assert group.calls.pop() == ("recv_anysource", (1, 0))


def test_its_results_are_the_callers(group: Recording) -> None:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert isinstance(work, Done)
    assert work.wait()
    assert tensor.tolist() == [3, 3]


def test_what_it_has_no_method_for_is_refused(group: Recording) -> None:
    with pytest.raises(RuntimeError, match="Backend Recording does not implement alltoall"):
        dist.all_to_all([_T] * 3, [_T] * 3, group=group)
    for send_or_receive in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="rank 0 is this one"):
            send_or_receive(_T, 0, group=group)
    assert not group.calls


def test_its_name_and_what_becomes_of_it_at_the_end(backend: str) -> None:
    assert Recording(0, 1).name() == "Recording"
    with thread_rank(0, 1, HashStore()):
        group = opened(f"cpu:{backend},cuda:{backend}")
        assert dist.get_backend() == backend == dist.Backend.RECORDING  # type: ignore[attr-defined]
        assert dist.get_backend_config() == "cpu:recording,cuda:recording"
        dist.destroy_process_group()
        assert group.calls == [("shutdown", ())]
        assert not dist.is_initialized()
        group = opened(backend)
        c10d._abort_process_group()
        assert group.calls == [("abort", ()), ("shutdown", ())]


def test_subgroups_are_of_the_same_backend_unless_another_is_named(backend: str) -> None:
    with thread_rank(0, 1, HashStore()):
        opened(backend)
        assert isinstance(dist.new_group([0]), Recording)
        own, _ = dist.new_subgroups(1)
        assert isinstance(own, Recording)
        native = dist.new_group([0], backend="gloo")
        assert (type(native), dist.get_backend(native)) == (dist.ProcessGroupGloo, "gloo")
        with pytest.raises(RuntimeError, match="made one by one"):
            dist.new_subgroups(1, backend=backend)


def test_its_ranks_are_numbered_anew(group: Recording) -> None:
    part = dist.new_group([0, 2], backend="recording")
    assert isinstance(part, Recording)
    assert (part.size(), part.rank(), dist.get_process_group_ranks(part)) == (2, 0, [0, 2])
    dist.broadcast(_T, 2, group=part)
    assert part.calls == [("broadcast", (1, 1))]


def test_a_group_of_it_beside_the_engines(backend: str) -> None:
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("gloo")
        own = dist.new_group(backend=backend)
        assert isinstance(own, Recording)
        assert isinstance(own, dist.ProcessGroup)
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        assert not isinstance(dist.group.WORLD, Recording)
        assert dist.get_backend(own) == backend
        dist.all_reduce(torch.zeros(1))
        assert own.calls == []
        with pytest.raises(RuntimeError, match="one backend for all devices"):
            dist.new_group(backend=f"cpu:gloo,cuda:{backend}")


def test_the_long_form_tells_the_creator_all(backend: str) -> None:
    told: list[Any] = []

    def create(given: c10d._DistributedBackendOptions, options: Any) -> Recording:
        told.append((given, options))
        return Recording(given.group_rank, given.group_size)

    dist.Backend.register_backend(backend, create, extended_api=True)
    with thread_rank(0, 1, HashStore()):
        opened(backend, pg_options="mine", timeout=timedelta(seconds=9))
        ((given, options),) = told
        assert (given.timeout, given.global_ranks_in_group) == (timedelta(seconds=9), [0])
        assert options == "mine"
        given.store.set("key", "value")
        assert given.store.get("key") == b"value"


def test_a_creator_that_returns_something_else_is_refused(backend: str) -> None:
    dist.Backend.register_backend(backend, lambda *_: object())
    with thread_rank(0, 1, HashStore()):
        with pytest.raises(RuntimeError, match="must return an object of a class derived"):
            dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
        assert not dist.is_initialized()


def test_a_group_that_was_not_made_by_the_world_is_not_registered() -> None:
    with pytest.raises(ValueError, match="is not registered"):
        dist.get_group_rank(Recording(0, 1), 0)
    with pytest.raises(TypeError, match="rank, size"):
        dist.ProcessGroup(3)


def test_a_rank_outside_learns_of_the_group_by_torchs_value_for_it() -> None:
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("fake", rank=0, world_size=4, store=HashStore())
        outside = dist.new_group([1, 3])
        assert outside is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_process_group_ranks(outside) == [1, 3]
        assert (dist.get_group_rank(outside, 3), dist.get_global_rank(outside, 0)) == (1, 1)
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_group_rank(outside, 0)
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_global_rank(outside, 2)


def test_a_reduce_operation_is_copied() -> None:
    for op in (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(2.0)):
        copied = dist.ReduceOp(op)
        assert copied == op
        assert copied is not op


def test_the_group_has_the_name_that_the_program_gave_the_backend() -> None:
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("gloo")
        group = c10d._get_default_group()
        assert group.name() == dist.new_group([0]).name() == "gloo"
        dist.destroy_process_group()
        torchestra.init_process_group()
        assert c10d._get_default_group().name() == "threads"


def test_a_backend_that_cannot_shrink_says_so() -> None:
    group = Recording(0, 2)
    for shrink in (group.shrink, lambda: group.shrink_when_idle([1])):
        with pytest.raises(TypeError, match="does not support shrinking operations: Recording, of backend"):
            shrink()


def test_a_group_that_has_lost_a_rank_with_its_world_is_aborted_by_its_backend() -> None:
    group = Recording(0, 2)
    ended: list[str] = []
    group.abort = lambda: ended.append("aborted")  # type: ignore[method-assign]
    group.communicator.abort("the world has been shrunk", failed=(1,))
    assert ended == ["aborted"]
