"""Values gathered by calls, and functions of torch.jit in calls."""

from __future__ import annotations

import pytest
import torch

import rpc_workers
from torchestra import rpc
from torchestra.errors import RpcError, RpcTimeoutError
from torchestra.rpc import gathering


def gather(rank: int) -> None:
    names = ["worker0", "worker1", "worker2"]
    for turn in range(3):  # one after the other, and each its own
        assert gathering.all_gather(rank * 10 + turn) == {
            name: number * 10 + turn for number, name in enumerate(names)
        }
    if rank:
        assert gathering.all_gather(torch.ones(rank), names[1:])["worker2"].numel() == 2
    at_once = [rpc.rpc_async(f"worker{rank}", gathering.barrier, (names,)) for _ in range(3)]
    for future in at_once:
        future.wait()


def test_every_worker_gets_what_all_have(kind: str) -> None:
    rpc_workers.run(kind, 3, gather)


def wait_in_vain() -> None:
    with pytest.raises(RpcTimeoutError):
        gathering.all_gather(None, timeout=0.05)


def test_who_does_not_come_is_not_waited_for_longer_than_told() -> None:
    rpc_workers.first("threads", 2, wait_in_vain)


class Unreadable:
    def __reduce__(self) -> object:
        return (_refuse, ())


def _refuse() -> None:
    raise ValueError("not to be read")


def tell_what_cannot_be_read(rank: int) -> None:
    if rank == 0:
        with pytest.raises(RpcError, match=r"(?s)Followers \['worker1'\] .*not to be read"):
            gathering.all_gather(Unreadable(), timeout=60)
    else:
        with pytest.raises(RpcTimeoutError):
            gathering.all_gather(None, timeout=0.5)


def test_the_leader_says_who_could_not_be_told() -> None:
    rpc_workers.run("processes", 2, tell_what_cannot_be_read)


def _script(function: object) -> object:
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch\.jit\.script"):
        return torch.jit.script(function)


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + tensor


def refused(tensor: torch.Tensor) -> torch.Tensor:
    raise ValueError("on purpose")


def call_scripts() -> None:
    assert rpc.rpc_sync("worker1", _twice, (torch.ones(2),)).tolist() == [2, 2]
    module = _script(torch.nn.Linear(2, 2))
    inputs = torch.ones(1, 2)
    assert torch.equal(rpc.rpc_sync("worker1", module, (inputs,)), module(inputs))
    for kind in (torch.jit.Error, RuntimeError):  # the script's own kind, and what torch's agents raise
        with pytest.raises(kind, match="on purpose"):
            rpc.rpc_sync("worker1", _refused, (torch.ones(2),))


def test_scripts_are_called_by_name_and_modules_sent_as_they_are() -> None:
    global _twice, _refused
    _twice, _refused = _script(twice), _script(refused)
    rpc_workers.first("threads", 2, call_scripts)
