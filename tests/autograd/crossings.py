"""Ways to call a function on a worker, and the comparison of programs on many workers with those on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchestra import autograd, rpc

Call = Callable[..., Any]


def here(_: int, fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def sync(worker: int, fn: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(worker, fn, args)


def async_(worker: int, fn: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_async(worker, fn, args).wait()


def remote(worker: int, fn: Callable[..., Any], *args: Any) -> Any:
    return rpc.remote(worker, fn, args).to_here()


WAYS = (sync, async_, remote)


def total(value: torch.Tensor) -> torch.Tensor:
    return torch.sparse.sum(value) if value.is_sparse else value.sum()


def local_gradients(
    program: Callable[..., Sequence[torch.Tensor]], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return what the program's gradients are if all of it runs here."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward([total(root) for root in program(here, *leaves)])
    found = [leaf.grad for leaf in leaves]
    for leaf, grad in zip(leaves, before, strict=True):
        leaf.grad = grad
    return found


def assert_same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if expected is None:
        # What only leads to an unused one among several results of a call has a gradient of zeros.
        assert found is None or not found.to_dense().any()
        return
    assert found is not None
    assert found.is_sparse == expected.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


def compare(
    program: Callable[..., Sequence[torch.Tensor]], *leaves: torch.Tensor, ways: Sequence[Call] = WAYS
) -> None:
    """Run ``program(call, *leaves)`` here, and with calls to other workers; gradients must be the same."""
    expected = local_gradients(program, leaves)
    for way in ways:
        with autograd.context() as context_id:
            autograd.backward(context_id, [total(root) for root in program(way, *leaves)])
            found = autograd.get_gradients(context_id)
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert_same(found.get(leaf), gradient)
            assert leaf.grad is None
        assert set(found) <= set(leaves)


def leaf(*shape: int, **options: Any) -> torch.Tensor:
    return torch.rand(shape, requires_grad=True, **options)


def sparse_leaf(dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> torch.Tensor:
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])
    values = torch.tensor([3.2, 4.1, 5.3], dtype=dtype)
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(places, values, (3, 3)).requires_grad_(requires_grad)
