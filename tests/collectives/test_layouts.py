"""Tensors whose elements do not lie one after the other, or are not what memory holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import pattern

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from worlds import run

# A tensor of 12 elements with the given values, in some layout.
Layout = Callable[[torch.Tensor], torch.Tensor]


def strided(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(24, dtype=values.dtype)[::2].copy_(values)


def transposed(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(4, 3, dtype=values.dtype).t().copy_(values.view(3, 4))


def channels_last(values: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(1, 3, 2, 2, dtype=values.dtype, memory_format=torch.channels_last)
    return tensor.copy_(values.view(1, 3, 2, 2))


def window(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(5, 6, dtype=values.dtype)[1:4, 1:5].copy_(values.view(3, 4))


def one_dimension_more(values: torch.Tensor) -> torch.Tensor:
    return values.clone().view(12, 1)


LAYOUTS: list[Layout] = [strided, transposed, channels_last, window, one_dimension_more]


def values_of(tensor: torch.Tensor) -> list[float]:
    return tensor.contiguous().flatten().tolist()


def all_operations(layout: Layout) -> None:
    """Tensors in this layout on every rank but the last, whose tensors are contiguous."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def made(values: torch.Tensor) -> torch.Tensor:
        return layout(values) if rank != size - 1 else values.clone()

    def sent(peer: int, salt: int = 0) -> torch.Tensor:
        return pattern(peer, 12, salt).float()

    def blank() -> torch.Tensor:
        return made(torch.zeros(12))

    total = sum(sent(peer) for peer in range(size)).tolist()
    tensor = made(sent(rank))
    dist.all_reduce(tensor)
    assert values_of(tensor) == total
    tensor = made(sent(rank))
    dist.reduce(tensor, 0)
    assert values_of(tensor) == (total if rank == 0 else sent(rank).tolist())
    tensor = made(sent(rank))
    dist.broadcast(tensor, 1)
    assert values_of(tensor) == sent(1).tolist()
    outputs = [blank() for _ in range(size)]
    dist.all_gather(outputs, made(sent(rank)))
    assert [values_of(output) for output in outputs] == [sent(peer).tolist() for peer in range(size)]
    dist.gather(made(sent(rank)), (outputs := [blank() for _ in range(size)]) if rank == 0 else None, 0)
    if rank == 0:
        assert [values_of(output) for output in outputs] == [sent(peer).tolist() for peer in range(size)]
    output = blank()
    dist.scatter(output, [made(sent(0, peer)) for peer in range(size)] if rank == 0 else None, 0)
    assert values_of(output) == sent(0, rank).tolist()
    output = blank()
    dist.reduce_scatter(output, [made(sent(rank, peer)) for peer in range(size)])
    assert values_of(output) == sum(sent(peer, rank) for peer in range(size)).tolist()
    outputs = [blank() for _ in range(size)]
    dist.all_to_all(outputs, [made(sent(rank, peer)) for peer in range(size)])
    assert [values_of(output) for output in outputs] == [sent(peer, rank).tolist() for peer in range(size)]
    whole = torch.stack([sent(rank, peer) for peer in range(size)])
    wide = torch.empty(size, 24)[:, ::2]
    dist.all_gather_into_tensor(wide, made(sent(rank)))
    assert wide.tolist() == [sent(peer).tolist() for peer in range(size)]
    dist.reduce_scatter_tensor(output, torch.empty(12, size).t().copy_(whole))
    assert values_of(output) == sum(sent(peer, rank) for peer in range(size)).tolist()
    dist.all_to_all_single(wide, torch.empty(12, size).t().copy_(whole))
    assert wide.tolist() == [sent(peer, rank).tolist() for peer in range(size)]
    dist.all_to_all_single(wide, torch.empty(12, size).t().copy_(whole), [1] * size, [1] * size)
    assert wide.tolist() == [sent(peer, rank).tolist() for peer in range(size)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_takes_any_layout(layout: Layout) -> None:
    run("threads", 3, all_operations, layout)


def views_of_complex_tensors() -> None:
    rank = dist.get_rank()
    for dtype in (torch.complex64, torch.complex128):
        base = torch.tensor([1 + 2j, 3 - 4j, 0.5j], dtype=dtype) * (rank + 1)
        conjugated = base.clone().conj()
        assert conjugated.is_conj()
        dist.all_reduce(conjugated)
        assert conjugated.is_conj()
        assert conjugated.tolist() == (base / (rank + 1) * 3).conj().tolist()
        negated = base.clone().conj().imag
        assert negated.is_neg()
        dist.all_reduce(negated)
        assert negated.tolist() == [-6.0, 12.0, -1.5]
        one = base.clone().conj().imag[:1]
        assert one.is_contiguous()
        assert one.is_neg()
        for _ in range(2):  # the second time by the fast path, if there is one
            dist.broadcast(one, 1)
            assert one.tolist() == [-4.0]
        outputs = [torch.empty(3, dtype=dtype) for _ in range(2)]
        dist.all_gather(outputs, base.conj())
        assert outputs[1].tolist() == (base / (rank + 1) * 2).conj().tolist()
        into = torch.empty(6, dtype=dtype).conj()
        dist.all_gather_into_tensor(into, base)
        assert into[3:].tolist() == (base / (rank + 1) * 2).tolist()


def test_conjugated_and_negated_views() -> None:
    run("threads", 2, views_of_complex_tensors)


def without_dimensions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor(rank + 1.0)
    for _ in range(2):
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.shape == ()
        assert tensor.item() == sum(range(1, size + 1))
    outputs = [torch.tensor(0.0) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor(float(rank)))
    assert [output.item() for output in outputs] == list(range(size))
    into = torch.empty(size)
    dist.all_gather_into_tensor(into, torch.tensor(float(rank)))
    assert into.tolist() == list(range(size))
    output = torch.tensor(0.0)
    dist.reduce_scatter_tensor(output, torch.arange(float(size)))
    assert output.item() == rank * size


def test_tensors_without_dimensions() -> None:
    run("threads", 3, without_dimensions)


def read_expanded() -> None:
    """A tensor that is only read may be expanded."""
    rank = dist.get_rank()
    expanded = torch.tensor([rank + 1.0]).expand(4)
    outputs = [torch.empty(4) for _ in range(2)]
    dist.all_gather(outputs, expanded)
    assert [output.tolist() for output in outputs] == [[1.0] * 4, [2.0] * 4]
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output, expanded)
    assert output.tolist() == [3.0, 3.0]


def write_expanded() -> None:
    tensor = torch.zeros(1).expand(3)
    into = torch.zeros(1).expand(6)
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.reduce(tensor, 0),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather([torch.empty(3), tensor], torch.empty(3)),
        lambda: dist.all_gather_into_tensor(into, torch.empty(3)),
        lambda: dist.scatter(tensor, None, 1 - dist.get_rank()),
        lambda: dist.reduce_scatter(tensor, [torch.empty(3)] * 2),
        lambda: dist.reduce_scatter_tensor(tensor, torch.empty(6)),
        lambda: dist.all_to_all([tensor] * 2, [torch.empty(3)] * 2),
        lambda: dist.all_to_all_single(into, torch.empty(6)),
    ):
        with pytest.raises(InvalidArgumentError, match=r"is an expanded tensor .* call \.clone\(\) first"):
            call()


def test_expanded_tensors_are_read_but_not_written() -> None:
    run("threads", 2, read_expanded)
    run("threads", 2, write_expanded)


def keep_gradients_out() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for _ in range(2):
        dist.broadcast(parameter, 0)
        dist.all_reduce(parameter)
    assert parameter.tolist() == [4.0] * 3
    product = parameter * 2
    dist.all_reduce(product)
    assert product.tolist() == [16.0] * 3
    odd = torch.ones(6, requires_grad=True)
    dist.all_reduce(odd[::2].detach())
    assert odd.tolist() == [2.0, 1.0] * 3


def test_tensors_that_need_gradients_are_written_like_others() -> None:
    run("threads", 2, keep_gradients_out)


def write_in_inference_mode() -> None:
    """Also by the thread of the group, which is not in that mode."""
    for asynchronous in (False, True):
        with torch.inference_mode():
            transposed, plain = torch.ones(4, 3).t(), torch.ones(3)
            for tensor in (transposed, plain):
                work = dist.all_reduce(tensor, async_op=asynchronous)
                assert work is None or work.wait()
                assert (tensor == 2).all()


def test_tensors_of_inference_mode() -> None:
    run("threads", 2, write_in_inference_mode)
