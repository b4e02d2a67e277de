"""Test which gradients share a bucket, and the memory of a bucket."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel import Reducer, compute_bucket_assignment_by_size
from torchestra.nn.parallel.buckets import FIRST_BUCKET_BYTES, make_bucket
from worlds import run


def sized(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors of so many bytes."""
    return [torch.empty(size // dtype.itemsize, dtype=dtype) for size in sizes]


def alternating(count: int) -> list[torch.Tensor]:
    """Tensors of 200 bytes, of float32 and float64 in turn."""
    return [each for _ in range(count) for each in (*sized(200), *sized(200, dtype=torch.float64))]


@pytest.mark.parametrize(
    ("tensors", "limits", "expected"),
    [
        (sized(400, 800, 400, 200), [400], [[0], [1], [2], [3]]),
        (alternating(3), [400], [[0, 2], [1, 3], [4], [5]]),
        (sized(40, 40, 40, 40), [40, 80], [[0], [1, 2], [3]]),
        (alternating(3), [200, 400], [[0], [1], [2, 4], [3, 5]]),
        (sized(8, 8, 8), [1000], [[0, 1, 2]]),
        (sized(4, 400, 4), [4, 40], [[0], [1], [2]]),
    ],
)
def test_a_bucket_has_one_dtype_and_is_closed_when_it_has_reached_its_size(
    tensors: list[torch.Tensor], limits: list[int], expected: list[list[int]]
) -> None:
    assert compute_bucket_assignment_by_size(tensors, limits)[0] == expected


def test_the_limits_of_the_buckets_are_told() -> None:
    plan, limits = compute_bucket_assignment_by_size(sized(*[40] * 5), [40, 80])
    assert plan == [[0], [1, 2], [3, 4]]
    assert limits == [40, 80, 80]


def test_sparse_gradients_are_alone() -> None:
    found = compute_bucket_assignment_by_size(sized(*[40] * 5), [40, 80], [False, True, False, False, True])
    assert found == ([[0], [1], [2, 3], [4]], [40, 0, 80, 0])


def test_given_an_order_buckets_are_in_the_order_in_which_they_will_be_complete() -> None:
    """The odd dtype of the first and the last: that bucket waits for the last and does not hold up others."""
    tensors = [*sized(8, dtype=torch.float64), *sized(8, 8), *sized(8, dtype=torch.float64)]
    assert compute_bucket_assignment_by_size(tensors, [100], tensor_indices=[3, 2, 0, 1])[0] == [
        [2, 0],
        [3, 1],
    ]
    assert compute_bucket_assignment_by_size(sized(*[40] * 4), [80], [], [3, 1, 0, 2])[0] == [[3, 1], [0, 2]]


@pytest.mark.parametrize(
    ("tensors", "limits", "options"),
    [
        ([], [80], {}),
        (sized(4), [], {}),
        ([torch.ones(2).to_sparse()], [80], {}),
        (sized(4, 4), [80], {"tensor_indices": [0]}),
        (sized(4, 4), [80], {"expect_sparse_gradient": [False]}),
    ],
)
def test_what_cannot_be_assigned_is_refused(
    tensors: list[torch.Tensor], limits: list[int], options: dict[str, list[int]]
) -> None:
    with pytest.raises(RuntimeError, match=r"compute_bucket_assignment_by_size: .*(sparse tensors|must)"):
        compute_bucket_assignment_by_size(tensors, limits, **options)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.complex64])


@given(
    st.lists(st.tuples(st.integers(0, 40), DTYPES), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(1, 200),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_tensor_is_in_one_bucket(
    shapes: list[tuple[int, torch.dtype]], first: int, cap: int, ordered: bool, random: object
) -> None:
    tensors = [torch.empty(length, dtype=dtype) for length, dtype in shapes]
    order = list(range(len(tensors)))
    if ordered:
        random.shuffle(order)
    plan, limits = compute_bucket_assignment_by_size(
        [tensors[index] for index in order], [first, cap], [], order if ordered else []
    )
    assert sorted(index for indices in plan for index in indices) == list(range(len(tensors)))
    place = {index: position for position, index in enumerate(order)}
    keys = [place[indices[-1 if ordered else 0]] for indices in plan]
    assert keys == sorted(keys)
    for indices, limit in zip(plan, limits, strict=True):
        assert [place[index] for index in indices] == sorted(place[index] for index in indices)
        assert len({tensors[index].dtype for index in indices}) == 1
        assert sum(tensors[index].nbytes for index in indices[:-1]) < limit


# -- memory


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
        bucket = make_bucket(0, (4, 3, 2, 1, 0), parameters, dist.group.WORLD, with_flat=True)
        assert [view.shape for view in bucket.views] == [each.shape for each in bucket.parameters]
        assert bucket.views[4].stride() == parameters[0].stride()
        assert bucket.views[3].stride() == parameters[1].stride()
        assert bucket.views[0].is_contiguous(), "strides that leave gaps are not imitated"
        for number, view in enumerate(bucket.views):
            view.fill_(number)
        held = torch.bincount(bucket.flat.int(), minlength=5)
        assert held.tolist() == [24, 0, 1, 24, 120]

    run("threads", 1, body)


def test_a_bucket_has_memory_only_where_all_of_it_must_be_in_one_tensor() -> None:
    def body() -> None:
        parameters = [torch.nn.Parameter(torch.empty(numel)) for numel in (3, 4, 5)]
        assert make_bucket(0, range(3), parameters, dist.group.WORLD, with_flat=False).flat is None
        assert make_bucket(0, range(3), parameters, dist.group.WORLD, with_flat=True).flat.numel() == 12
        assert make_bucket(0, [1], parameters, dist.group.WORLD, with_flat=True, sparse=True).flat is None

    run("threads", 1, body)


# -- reducers made by hand


class Three(nn.Module):
    """Layers of which the first may be of another dtype, and the last may be left out."""

    def __init__(self, first: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 10, bias=False, dtype=first)
        self.fc2 = nn.Linear(10, 4, bias=False)
        self.fc3 = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, use_fc3: bool = True) -> torch.Tensor:
        x = self.fc2(self.fc1(x.to(self.fc1.weight.dtype)).relu().float()).relu()
        return (self.fc3(x) if use_fc3 else x).softmax(1)


def by_dtype(parameters: list[torch.nn.Parameter]) -> list[list[int]]:
    return [
        list(group) for _, group in groupby(range(len(parameters)), key=lambda index: parameters[index].dtype)
    ]


def reducer_of(model: nn.Module, plan: list[list[int]] | None = None, **options: object) -> Reducer:
    parameters = list(model.parameters())
    plan = plan or by_dtype(parameters)
    return Reducer(parameters, plan, [FIRST_BUCKET_BYTES] * len(plan), dist.group.WORLD, **options)


def loss_of(model: nn.Module, seed: int = 0, **options: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    samples, targets = torch.rand(10, 2, generator=generator), torch.randint(4, (10,), generator=generator)
    return nn.functional.cross_entropy(model(samples, **options), targets)


def test_one_bucket_of_one_dtype() -> None:
    run("threads", 1, lambda: reducer_of(Three(), [[0, 1, 2]]))


def test_two_dtypes_in_a_bucket_are_refused() -> None:
    def body() -> None:
        expected = r"same dtype; bucket 0 has torch\.float32, torch\.float64"
        with pytest.raises(InvalidArgumentError, match=expected):
            reducer_of(Three(torch.float64), [[0, 1, 2]])

    run("threads", 1, body)


def test_each_dtype_in_a_bucket_of_its_own() -> None:
    run("threads", 1, lambda: reducer_of(Three(torch.float64)))


def test_a_reducer_by_hand_reduces() -> None:
    def body() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Three(torch.float64)
        reducer = reducer_of(model)
        reducer.prepare_for_forward()
        output = loss_of(model, dist.get_rank())
        reducer.prepare_for_backward(output)
        output.backward()
        reducer.check_finished()
        assert reducer.counters.steps == 1
        return [each.grad for each in model.parameters()]

    for rank in run("processes", 2, body_of_reducer_by_hand):
        for found, expected in rank:
            torch.testing.assert_close(found, expected)
    run("threads", 1, body)


def body_of_reducer_by_hand() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each gradient, and the mean of those that one process computes for the ranks."""
    torch.manual_seed(0)
    model = Three(torch.float64)
    (sum(loss_of(model, rank) for rank in range(2)) / 2).backward()
    expected = [each.grad for each in model.parameters()]
    model.zero_grad()
    reducer = reducer_of(model)
    reducer.prepare_for_forward()
    output = loss_of(model, dist.get_rank())
    reducer.prepare_for_backward([output])
    output.backward()
    return [(each.grad, other) for each, other in zip(model.parameters(), expected, strict=True)]


def test_a_reducer_by_hand_leaves_unused_parameters_alone() -> None:
    def body() -> None:
        model = Three(torch.float64)
        reducer = reducer_of(model, find_unused_parameters=True)
        reducer.prepare_for_forward()
        output = loss_of(model, use_fc3=False)
        assert model.fc3.weight.grad is None
        reducer.prepare_for_backward(output)
        output.backward()
        assert model.fc3.weight.grad is None
        assert model.fc2.weight.grad is not None
        assert reducer.counters.steps == 1
        assert reducer.local_used_map.tolist() == [1, 1, 0]

    run("threads", 1, body)


def test_a_reducer_by_hand_in_a_training_loop() -> None:
    """prepare_for_forward() is called once only."""

    def body() -> None:
        model = Three(torch.float64)
        reducer = reducer_of(model, find_unused_parameters=True)
        reducer.prepare_for_forward()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            output = loss_of(model, step, use_fc3=step > 0)
            reducer.prepare_for_backward(output)
            output.backward()
            optimizer.step()
        assert reducer.counters.steps == 3

    run("threads", 1, body)


@pytest.mark.parametrize("plan", [[(0,)], [(0, 1), (1,)], [(0, 1, 2)], [(0, 1), ()]])
def test_a_plan_that_leaves_out_or_repeats_a_parameter_is_refused(plan: list[tuple[int, ...]]) -> None:
    def body() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        with pytest.raises(InvalidArgumentError, match="must name each of 2 parameters once"):
            Reducer(parameters, plan, [400] * len(plan), dist.group.WORLD)

    run("threads", 1, body)


@pytest.mark.parametrize(
    ("plan", "sparse", "message"),
    [
        ([[0, 1]], [True, False], "Buckets with more than one variable cannot include variables that expect"),
        ([[0], [1]], [True], "must have an entry for each of 2 parameters, got 1"),
    ],
)
def test_sparse_gradients_beside_others_are_refused(
    plan: list[list[int]], sparse: list[bool], message: str
) -> None:
    def body() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        with pytest.raises(InvalidArgumentError, match=message):
            Reducer(parameters, plan, [400] * len(plan), dist.group.WORLD, sparse)
        with pytest.raises(InvalidArgumentError, match="Expected at least one parameter"):
            Reducer([], [], [], dist.group.WORLD)

    run("threads", 1, body)
