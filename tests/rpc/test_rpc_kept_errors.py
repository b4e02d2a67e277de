"""Test that an exception which a worker keeps, as the outcome of a call, keeps nothing else alive."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest

import rpc_workers
from torchestra import rpc
from worlds import WORLD_SECONDS


class Held:
    """Something in a frame of the program or of torchestra, which the group's memory is as well."""


_held: list[weakref.ref[Held]] = []


def fail_with_a_variable() -> None:
    held = Held()
    _held.append(weakref.ref(held))
    raise ValueError("as it should")


def _catch(call: Callable[[], object]) -> None:
    held = Held()
    _held.append(weakref.ref(held))
    with pytest.raises(ValueError, match="as it should"):
        call()


def _value_at(worker: str) -> None:
    rpc.remote(worker, fail_with_a_variable).to_here()


def _type_at(worker: str) -> None:
    rref = rpc.remote(worker, fail_with_a_variable)
    rref._get_type()


def _answer_of(worker: str) -> None:
    rpc.rpc_async(worker, fail_with_a_variable).wait()


def _chained(worker: str) -> None:
    future = rpc.rpc_async(worker, fail_with_a_variable)
    with pytest.raises(ValueError, match="as it should"):
        future.wait()
    future.wait()


def fetched(rref: rpc.RRef) -> None:
    rref.to_here()


def _failed_at(worker: str) -> rpc.RRef:
    rref = rpc.remote(worker, fail_with_a_variable)
    with pytest.raises(ValueError, match="as it should"):
        rref._get_future().wait()
    return rref


def _passed_on_from(worker: str) -> None:
    rpc.rpc_sync("worker1", fetched, (_failed_at(worker),))


def _method_at(worker: str) -> None:
    _failed_at(worker).rpc_sync().method()


def _pickled(worker: str) -> None:
    rref = _failed_at(worker)
    rref._serialize()


def fail_in_every_way() -> None:
    for way in (_value_at, _type_at, _answer_of, _chained, _passed_on_from, _method_at):
        for worker in ("worker0", "worker1"):
            _catch(lambda: way(worker))  # noqa: B023
    _catch(lambda: _pickled("worker1"))


def test_errors_of_calls_keep_no_variables() -> None:
    _held.clear()
    rpc_workers.first("threads", 2, fail_in_every_way)
    assert len(_held) == 26
    deadline = time.monotonic() + WORLD_SECONDS
    while left := still_kept():
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def still_kept() -> list[weakref.ref[Held]]:
    """Return those that are kept; a thread of a worker may keep some until it ends."""
    gc.collect()
    return [each for each in _held if each() is not None]
