"""The bucket plan, and the memory of a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.buckets import make_bucket, plan_buckets
from torchestra.nn.parallel.reducer import Reducer
from worlds import run


def sized(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors of so many bytes."""
    return [torch.empty(size // dtype.itemsize, dtype=dtype) for size in sizes]


def test_gradients_are_expected_in_the_reverse_order_of_parameters() -> None:
    assert plan_buckets(sized(8, 8, 8), 1000, 1000) == ((2, 1, 0),)


def test_the_first_bucket_is_closed_early() -> None:
    assert plan_buckets(sized(8, 8, 8, 8, 8), 8, 16) == ((4,), (3, 2), (1, 0))


def test_a_bucket_is_closed_when_it_has_reached_its_size_not_before() -> None:
    assert plan_buckets(sized(8, 4, 8, 100, 4), 1, 20) == ((4,), (3,), (2, 1, 0))


def test_a_parameter_larger_than_a_bucket_closes_it() -> None:
    assert plan_buckets(sized(4, 400, 4), 4, 40) == ((2,), (1,), (0,))


def test_a_bucket_has_one_dtype() -> None:
    parameters = [torch.empty(4, dtype=dtype) for dtype in (torch.float32, torch.float64) * 3]
    assert plan_buckets(parameters, 1000, 1000) == ((5, 3, 1), (4, 2, 0))


def test_every_dtype_has_a_small_first_bucket() -> None:
    parameters = [torch.empty(4, dtype=dtype) for dtype in (torch.float32, torch.float64) * 3]
    assert plan_buckets(parameters, 1, 1000) == ((5,), (4,), (3, 1), (2, 0))


def test_a_bucket_that_waits_for_an_early_layer_does_not_hold_up_the_others() -> None:
    """The odd dtype of the last and the first parameter: its bucket is complete last, so it is last."""
    odd = torch.empty(1, dtype=torch.float64)
    parameters = [odd, *sized(8, 8), odd]
    assert plan_buckets(parameters, 100, 100) == ((2, 1), (3, 0))


def test_no_parameters_make_no_bucket() -> None:
    assert plan_buckets([]) == ()


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.complex64])


@given(st.lists(st.tuples(st.integers(0, 40), DTYPES), max_size=30), st.integers(1, 100), st.integers(1, 200))
def test_every_parameter_is_in_one_bucket(
    shapes: list[tuple[int, torch.dtype]], first: int, cap: int
) -> None:
    parameters = [torch.empty(length, dtype=dtype) for length, dtype in shapes]
    plan = plan_buckets(parameters, first, cap)
    assert sorted(index for indices in plan for index in indices) == list(range(len(parameters)))
    last = [indices[-1] for indices in plan]
    assert last == sorted(last, reverse=True)
    for indices in plan:
        assert list(indices) == sorted(indices, reverse=True)
        assert len({parameters[index].dtype for index in indices}) == 1
        before_last = sum(parameters[index].nbytes for index in indices[:-1])
        assert before_last < max(first, cap)


def test_the_views_of_a_bucket_have_the_layout_of_their_parameters() -> None:
    """An optimizer is slow where a gradient's strides differ from its parameter's."""

    def body() -> None:
        parameters = [
            torch.nn.Parameter(tensor)
            for tensor in (
                torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
                torch.empty(4, 6).t(),
                torch.empty(()),
                torch.empty(0, 3),
                torch.empty(8, 6)[::2],
            )
        ]
        bucket = make_bucket((4, 3, 2, 1, 0), parameters, dist.group.WORLD)
        shapes = [view.shape for view in bucket.views]
        assert shapes == [parameter.shape for parameter in bucket.parameters]
        assert bucket.views[4].stride() == parameters[0].stride()
        assert bucket.views[3].stride() == parameters[1].stride()
        assert bucket.views[0].is_contiguous(), "strides that leave gaps are not imitated"
        for number, view in enumerate(bucket.views):
            view.fill_(number)
        held = torch.bincount(bucket.flat.int(), minlength=5)
        assert held.tolist() == [24, 0, 1, 24, 120]

    run("threads", 1, body)


@pytest.mark.parametrize("plan", [[(0,)], [(0, 1), (1,)], [(0, 1, 2)], [(0, 1), ()]])
def test_a_plan_that_leaves_out_or_repeats_a_parameter_is_refused(plan: list[tuple[int, ...]]) -> None:
    def body() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        with pytest.raises(InvalidArgumentError, match="must name each of 2 parameters once"):
            Reducer(parameters, ["a", "b"], plan, dist.group.WORLD)

    run("threads", 1, body)


def test_a_bucket_of_two_dtypes_is_refused() -> None:
    def body() -> None:
        parameters = [
            torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)
        ]
        with pytest.raises(
            InvalidArgumentError, match=r"bucket 0 must be of one dtype, got torch\.float32, torch"
        ):
            Reducer(parameters, ["a", "b"], [(0, 1)], dist.group.WORLD)

    run("threads", 1, body)
