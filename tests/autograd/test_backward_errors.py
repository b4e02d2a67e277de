"""Test that an error in a backward pass is told where it began, and the next pass is not disturbed."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from crossings import leaf

import rpc_workers
import worlds
from torchestra import autograd, rpc
from torchestra.errors import BackwardError, InvalidArgumentTypeError, RpcTimeoutError, WorkerFailedError


class FailsBackward(torch.autograd.Function):
    fails = True

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if FailsBackward.fails:
            raise LookupError("on purpose")
        return gradient


def fail_in_backward(value: torch.Tensor) -> torch.Tensor:
    return FailsBackward.apply(value)


def deep(worker: int, value: torch.Tensor) -> torch.Tensor:
    value = value * 2
    if worker == 3:
        return FailsBackward.apply(value)
    return value + rpc.rpc_sync(worker, deep, (worker + 1, value))


def set_failing(fails: bool) -> None:
    FailsBackward.fails = fails


def passes_running() -> int:
    return int(autograd.debug_info()["num_current_backward_passes"])


def await_quiet(*workers: int) -> None:
    deadline = time.monotonic() + 20
    while any(rpc.rpc_sync(worker, passes_running) for worker in workers):
        assert time.monotonic() < deadline


def errors_of_functions() -> None:
    value = leaf(3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(1, deep, (2, value)).sum()
        for _ in range(3):
            with pytest.raises(BackwardError, match=r"Error on Node 2: on purpose") as caught:
                autograd.backward(context_id, [loss], retain_graph=True)
            assert "test_backward_errors.py" in str(caught.value), "the traceback of where it happened"
            assert "'worker2'" in str(caught.value)
            assert isinstance(caught.value.__cause__, LookupError)
            await_quiet(0, 1, 2)
        for worker in (0, 1, 2):
            rpc.rpc_sync(worker, set_failing, (False,))
        autograd.backward(context_id, [loss], retain_graph=True)
        torch.testing.assert_close(autograd.get_gradients(context_id)[value], torch.full((3,), 2.0 + 4.0))
        for worker in (0, 1, 2):
            rpc.rpc_sync(worker, set_failing, (True,))
    with autograd.context() as context_id:  # at the origin, in the midst of what others wait for
        middle = FailsBackward.apply(rpc.rpc_sync(1, torch.mul, (value, 2)))
        loss = rpc.rpc_sync(2, torch.sum, (middle,))
        with pytest.raises(RuntimeError, match=r"Error on Node 0: on purpose") as caught:
            autograd.backward(context_id, [loss])
        assert isinstance(caught.value.__cause__, LookupError)
        await_quiet(0, 1, 2)


def test_an_error_anywhere_is_raised_where_the_pass_began_and_does_not_last(kind: str) -> None:
    rpc_workers.first(kind, 3, errors_of_functions)


def arguments() -> None:
    value = leaf(3)
    with autograd.context() as context_id:
        for wrong in ((context_id, None), (None, None), (context_id, [1]), ("1", [value])):
            with pytest.raises(InvalidArgumentTypeError, match="incompatible function arguments"):
                autograd.backward(*wrong)
        for roots, message in (
            ([], "No tensors provided for gradient computation"),
            ([torch.ones(3)], "requires_grad not set on"),
            ([value], "is not a scalar, all roots need to be scalar"),
            ([leaf(1)], "does not have a valid gradient function"),
        ):
            with pytest.raises(RuntimeError, match=message):
                autograd.backward(context_id, roots)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
        autograd.backward(100, [value.sum()])


def test_wrong_arguments_are_refused() -> None:
    rpc_workers.first("threads", 1, arguments)


kept: list[torch.Tensor] = []


def not_through_messages() -> None:
    value = leaf(3)
    with autograd.context() as context_id:
        result = rpc.rpc_sync(1, torch.mul, (value, 2)).sum()
        with pytest.raises(RuntimeError, match=r"call torchestra\.autograd\.backward"):
            result.backward()
        autograd.backward(context_id, [result])
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            autograd.backward(context_id, [result])
        kept.append(rpc.rpc_sync(1, torch.mul, (value, 2)))
    with autograd.context() as context_id:
        loss = (kept.pop() * value).sum()
        with pytest.raises(RuntimeError, match=r"kept from an earlier context \(detach\(\) it\)"):
            autograd.backward(context_id, [loss])
    with autograd.context() as context_id:
        autograd.backward(context_id, [(value * 2).sum()])
        assert autograd.get_gradients(context_id)[value].tolist() == [2, 2, 2]


def test_a_message_is_not_gone_through_twice_nor_from_outside() -> None:
    rpc_workers.first("threads", 2, not_through_messages)


class EndsContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, context_id: int) -> torch.Tensor:
        ctx.context_id = context_id
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        from torchestra.autograd.contexts import contexts_of
        from torchestra.rpc.current import current_agent

        contexts_of(current_agent()).release(ctx.context_id)
        return gradient, None


def ended_meanwhile() -> None:
    value = leaf(3)
    with autograd.context() as context_id:
        loss = value
        for _ in range(10):
            loss = rpc.rpc_sync(1, torch.mul, (loss, 2))
        loss = EndsContext.apply(loss, context_id).sum()
        with pytest.raises(RuntimeError):
            autograd.backward(context_id, [loss])
    await_quiet(0, 1)


def test_a_context_may_be_ended_in_its_backward() -> None:
    rpc_workers.first("threads", 2, ended_meanwhile)


class Stays(torch.autograd.Function):
    """In its backward, until the caller has given up."""

    given_up = threading.Event()

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert Stays.given_up.wait(worlds.OP_SECONDS)
        return gradient


def stay(value: torch.Tensor) -> torch.Tensor:
    return Stays.apply(value)


def late() -> None:
    value = leaf(3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(1, stay, (value,)).sum()
        rpc.set_rpc_timeout(0.2)
        try:
            with pytest.raises(
                RpcTimeoutError, match=r"has waited 0\.2 s in a backward pass.*from 'worker1'"
            ):
                autograd.backward(context_id, [loss])
        finally:
            Stays.given_up.set()
        rpc.set_rpc_timeout(30)
    await_quiet(0, 1)


def test_a_worker_that_takes_longer_than_calls_may_take_is_named() -> None:
    rpc_workers.first("threads", 2, late)


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_backward(value: torch.Tensor) -> torch.Tensor:
    return Dies.apply(value)


def by_way_of(worker: int, value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(worker, die_in_backward, (value * 2,)) * 3


def survive() -> None:
    rank = rpc_workers.begin()
    worlds.store_barrier()
    if rank:
        worlds.await_note("over")
        rpc.shutdown(graceful=False)
        return
    value = leaf(3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(1, by_way_of, (2, value)).sum()
        with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died") as caught:
            autograd.backward(context_id, [loss])
    assert caught.value.worker == "worker2"
    with autograd.context() as context_id:  # the others go on
        autograd.backward(context_id, [rpc.rpc_sync(1, torch.mul, (value, 2)).sum()])
        assert autograd.get_gradients(context_id)[value].tolist() == [2, 2, 2]
    await_quiet(0, 1)
    worlds.leave_note("over")
    rpc.shutdown(graceful=False)


def test_a_worker_that_is_killed_in_a_backward_is_named() -> None:
    with worlds.processes(3, survive) as world:
        for rank in (0, 1):
            world.wait(rank).result()
