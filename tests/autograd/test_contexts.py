"""Contexts: their numbers, where they are known, and that they end everywhere."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from crossings import leaf

import rpc_workers
from torchestra import autograd, rpc
from torchestra.autograd.api import current_context, new_context, release_context
from torchestra.autograd.contexts import Context, ContextMark, SendRecorder, contexts_of
from torchestra.rpc.current import current_agent
from torchestra.rpc.thread_state import thread_state


def known(context_id: int) -> bool:
    return contexts_of(current_agent()).find(context_id) is not None


def counts() -> dict[str, Any]:
    return autograd.debug_info()


NOTHING = {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}


def await_nothing(*workers: int) -> None:
    """Wait until no worker knows of a context any more: they are told after the context has ended."""
    deadline = time.monotonic() + 20
    while any(rpc.rpc_sync(worker, counts) != NOTHING for worker in workers):
        assert time.monotonic() < deadline


def numbers() -> None:
    seen = []
    for _ in range(20):
        with autograd.context() as context_id:
            assert current_context().context_id == context_id
            assert context_id >> 48 == current_agent().number
            seen.append(context_id)
    assert len(set(seen)) == 20
    assert contexts_of(current_agent()).max_number == 281474976710655 + (current_agent().number << 48)
    for context_id in seen:
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            autograd.get_gradients(context_id)
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        current_context()
    with (
        autograd.context() as context_id,
        pytest.raises(
            RuntimeError, match=f"Already have an autograd context id for this thread: {context_id}"
        ),
        autograd.context(),
    ):
        pass
    assert counts() == NOTHING


def test_numbers_name_the_worker_and_contexts_do_not_nest() -> None:
    rpc_workers.run("threads", 2, lambda rank: numbers())


def add(one: Any, other: Any) -> Any:
    return one + other


def add_by_way_of(worker: int, *args: Any) -> Any:
    return rpc.rpc_sync(worker, add, args)


def fail(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def is_in(context_id: int) -> bool:
    return thread_state.scope is not None and thread_state.scope.context_id == context_id


def calls_that_fail() -> None:
    with autograd.context() as context_id:
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync(1, fail, (leaf(2),))
        with pytest.raises(RuntimeError):
            rpc.rpc_sync(2, torch.matmul, (leaf(3, 3), leaf(6, 6)))
        loss = rpc.rpc_sync(2, torch.sum, (leaf(2),))
        autograd.backward(context_id, [loss])  # they do not hold it up
        raise ZeroDivisionError


def spread() -> None:
    for args in ((leaf(2), leaf(2)), (torch.ones(2), torch.ones(2)), (1, 2)):
        with autograd.context() as context_id:
            rpc.rpc_sync(1, add_by_way_of, (2, *args))
            assert rpc.rpc_sync(1, is_in, (context_id,))
            assert all(rpc.rpc_sync(worker, known, (context_id,)) for worker in (0, 1, 2))
            assert current_context()._known_worker_ids() == {1, 2}
        await_nothing(0, 1, 2)
    assert not rpc.rpc_sync(1, is_in, (context_id,))
    with pytest.raises(ZeroDivisionError):
        calls_that_fail()
    await_nothing(0, 1, 2)
    with autograd.context():
        late = rpc.rpc_async(1, add_by_way_of, (2, leaf(2), leaf(2)))
    late.wait()
    await_nothing(0, 1, 2)


def test_contexts_spread_with_calls_and_end_everywhere(kind: str) -> None:
    rpc_workers.first(kind, 3, spread)


def node_names(functions: dict[int, Any]) -> list[list[str]]:
    return [[node.name() for node, _ in function.next_functions] for function in functions.values()]


def graph_there(context_id: int) -> Any:
    context = contexts_of(current_agent()).get(context_id)
    return node_names(context._send_functions()), len(context._recv_functions())


def graph() -> None:
    one, other = leaf(3, 3), leaf(3, 3)
    received = "torch::distributed::autograd::RecvRpcBackward"
    leaf_node = "torch::autograd::AccumulateGrad"
    with autograd.context() as context_id:
        result = rpc.rpc_sync(
            1,
            add_by_way_of,
            (
                0,
                one,
                other,
            ),
        )
        context = current_context()
        sends, receives = context._send_functions(), context._recv_functions()
        assert node_names(sends) == [[leaf_node, leaf_node], ["AddBackward0"]]
        assert next(iter(sends.values())).next_functions[0][0].variable is one
        assert result.grad_fn is list(receives.values())[-1]
        assert result.grad_fn.name() == received
        assert rpc.rpc_sync(1, graph_there, (context_id,)) == ([[received, received], [received]], 2)
    with autograd.context() as context_id:
        rpc.rpc_sync(1, add, (torch.ones(2), 1))
        assert not current_context()._send_functions()
        assert not current_context()._recv_functions()
        assert rpc.rpc_sync(1, known, (context_id,))


def test_each_message_with_tensors_has_one_node_on_each_side() -> None:
    rpc_workers.first("threads", 2, graph)


alive: list[weakref.ref[torch.Tensor]] = []


def doubled(value: torch.Tensor) -> torch.Tensor:
    inner = value * 2
    alive.append(weakref.ref(value))
    alive.append(weakref.ref(inner))
    return inner * inner


def how_many_live() -> int:
    return sum(each() is not None for each in alive)


def what_is_left() -> None:
    value = doubled(leaf(3))
    with autograd.context() as context_id:
        result = rpc.rpc_sync(1, doubled, (value,))
        autograd.backward(context_id, [result.sum()], retain_graph=True)
        assert rpc.rpc_sync(1, how_many_live) >= 1
    del value, result
    deadline = time.monotonic() + 20
    while any(rpc.rpc_sync(worker, how_many_live) for worker in (0, 1)):
        assert time.monotonic() < deadline


def test_nothing_of_a_graph_is_left_when_its_context_is_over(kind: str) -> None:
    gc.disable()  # what is left must not wait for the garbage collector
    try:
        rpc_workers.first(kind, 2, what_is_left)
    finally:
        gc.enable()
        alive.clear()


def one_of_many(errors: list[BaseException]) -> None:
    try:
        one, other = leaf(3, 3), leaf(3, 3)
        for _ in range(5):
            with autograd.context() as context_id:
                third = rpc.rpc_sync(1, torch.add, (one, other))
                fourth = rpc.rpc_sync(1, torch.mul, (other, third))
                autograd.backward(context_id, [rpc.rpc_sync(1, torch.matmul, (third, fourth)).sum()])
                found = autograd.get_gradients(context_id)
            third = one + other
            (third @ (other * third)).sum().backward()
            torch.testing.assert_close(found[one], one.grad)
            torch.testing.assert_close(found[other], other.grad)
            one.grad = other.grad = None
    except BaseException as error:
        errors.append(error)


def many(rank: int) -> None:
    errors: list[BaseException] = []
    if rank != 1:
        import contextvars

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(one_of_many, errors))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        await_nothing(rank)


def test_many_contexts_at_once_from_many_threads(kind: str) -> None:
    rpc_workers.run(kind, 3, many)


def across_threads() -> None:
    context = new_context()
    value = leaf(2)
    loss = rpc.rpc_sync(1, torch.sum, (value,))
    agent = current_agent()
    ended: list[Any] = []

    def end() -> None:
        with pytest.raises(RuntimeError):
            current_context()  # a context belongs to the thread that made it
        contexts_of(agent).release(context.context_id)
        ended.append(True)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert ended
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        autograd.backward(context.context_id, [loss])
    assert torch.equal(rpc.rpc_sync(1, add, (torch.ones(1), 1)), torch.full((1,), 2.0))
    release_context(context.context_id)
    with autograd.context():
        pass
    await_nothing(0, 1)


def test_a_context_that_another_thread_has_ended_is_over() -> None:
    rpc_workers.first("threads", 2, across_threads)


class Gate:
    """Holds a message to worker 2 back, which its sender has noted, until that worker was told of a pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_noted, self.may_go = threading.Event(), threading.Event()
        close = SendRecorder.close

        def noted(recorder: SendRecorder) -> ContextMark | None:
            mark = close(recorder)
            if recorder._to == 2 and mark is not None and mark.message is not None:
                self.is_noted.set()
                assert self.may_go.wait(20)
            return mark

        monkeypatch.setattr(SendRecorder, "close", noted)
        end_task = Context.end_task

        def ended(context: Context, key: Any) -> Any:
            task = end_task(context, key)
            if context.contexts.rank == 2:
                self.may_go.set()
            return task

        monkeypatch.setattr(Context, "end_task", ended)


def call_on(tensor: torch.Tensor) -> None:
    rpc.rpc_async(2, add, (tensor, 1))


def go_backward_meanwhile(gate: Gate) -> None:
    value = leaf(2)
    try:
        with autograd.context() as context_id:
            rpc.rpc_async(1, call_on, (value,))
            assert gate.is_noted.wait(20)
            autograd.backward(context_id, [(3 * value).sum()])
            assert autograd.get_gradients(context_id)[value].tolist() == [3.0, 3.0]
    finally:
        gate.may_go.set()
    await_nothing(0, 1, 2)


def test_a_pass_may_come_to_a_worker_before_the_call_by_which_it_takes_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    rpc_workers.run("threads", 3, lambda rank: go_backward_meanwhile(gate) if rank == 0 else None)
