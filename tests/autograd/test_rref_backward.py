"""Backward passes from values that references refer to."""

from __future__ import annotations

import pytest
import torch

import rpc_workers
import worlds
from torchestra import autograd, rpc


def total(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum()


def echo(value: object) -> object:
    return value


def run_from_references() -> None:
    leaf = torch.rand(3, requires_grad=True)
    rpc.RRef(leaf.sum() + leaf.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]
    for owner in (True, False):
        with autograd.context() as context_id:
            if owner:
                rref = rpc.RRef(rpc.rpc_sync("worker1", torch.add, (leaf, leaf)).sum() / 2)
            else:
                rref = rpc.remote("worker1", total, (leaf,))
            rref.backward(context_id, retain_graph=True)
            rref.backward(context_id)
            assert autograd.get_gradients(context_id)[leaf].tolist() == [2, 2, 2]
    assert leaf.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_a_value_is_a_root(kind: str) -> None:
    rpc_workers.first(kind, 2, run_from_references)


def run_wrongly() -> None:
    leaf = torch.rand(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        rpc.RRef(torch.rand(3)).backward()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        rpc.RRef(leaf).backward()
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
        rpc.RRef(leaf.sum()).backward(100)
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for \.backward"):
        rpc.RRef("text").backward()
    there = rpc.remote("worker1", echo, ("text",))
    with autograd.context() as context_id, pytest.raises(RuntimeError, match="RRef should contain a tensor"):
        there.backward(context_id)
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        there.backward()


def test_what_is_no_root_is_told() -> None:
    rpc_workers.first("threads", 2, run_wrongly)
