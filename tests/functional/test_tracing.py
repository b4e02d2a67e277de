"""Functional collectives in traced, compiled and exported programs; Inductor has a file of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchestra as dist
import torchestra.functional as funcol
from worlds import kind_that_compiles, run

Function = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left() -> None:
    torch.compiler.reset()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_meta_tensors_give_shapes_without_any_world() -> None:
    x = torch.rand((2, 3, 4), device="meta")
    assert not dist.is_initialized()
    assert funcol.all_reduce(x, "sum", "0").shape == x.shape
    ops = torch.ops.torchestra
    assert ops.broadcast(x, 0, "0").shape == x.shape
    assert ops.all_gather_into_tensor(x, 5, "0").shape == (10, 3, 4)
    assert ops.reduce_scatter_tensor(x, "sum", 2, "0").shape == (1, 3, 4)
    assert ops.all_to_all_single(x, [3, 4], [1, 1], "0").shape == (7, 3, 4)
    assert [each.shape for each in ops.all_reduce_coalesced([x, x[0]], "sum", "0")] == [(2, 3, 4), (3, 4)]
    assert [each.shape for each in ops.all_gather_into_tensor_coalesced([x, x[0]], 2, "0")] == [
        (4, 3, 4),
        (6, 4),
    ]
    (piece,) = ops.reduce_scatter_tensor_coalesced([x], "sum", 2, "0")
    assert piece.shape == (1, 3, 4)
    with pytest.raises(ValueError, match="unknown reduce operation"):
        ops.all_reduce(x, "mean", "0")


def test_fake_tensors_give_shapes() -> None:
    with FakeTensorMode():
        assert funcol.all_reduce(torch.empty(2, 3), "sum", "0").shape == (2, 3)


def graphs() -> list[str]:
    mesh = dist.DeviceMesh("cpu", torch.arange(2))
    functions: list[Function] = [
        lambda t: funcol.all_reduce(t, "sum", world()) + 1,
        lambda t: funcol.all_reduce(t, "sum", mesh) + 1,
        lambda t: funcol.all_reduce(t, "sum", (mesh, 0)) + 1,
        lambda t: funcol.all_gather_tensor(t, 0, [0, 1]) + 1,
    ]
    return [str(make_fx(function)(torch.rand(4)).graph) for function in functions]


def test_graphs_show_the_operator_and_the_wait_and_hold_nothing_else() -> None:
    """In processes: make_fx is not made for two threads at once."""
    reduced, in_mesh, in_dimension, gathered = run("processes", 2, graphs)[0]
    for graph in (reduced, in_mesh, in_dimension):
        assert (
            0 < graph.index("torchestra.all_reduce.default") < graph.index("torchestra.wait_tensor.default")
        )
    for graph in (reduced, in_mesh, in_dimension, gathered):
        assert "get_attr" not in graph
        assert graph.count("wait_tensor.default") == 1


# -- compiled


def compiled(function: Function) -> Function:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def as_it_is(function: Function) -> Function:
    return function


def same(result: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert result is not None
    torch.testing.assert_close(result.detach() + 0, expected)


def differentiated_all_to_all(prepared: Callable[[Function], Function]) -> None:
    size, name = dist.get_world_size(), world().group_name
    t = torch.ones((size, 2), requires_grad=True)

    def exchange(t: torch.Tensor, size: int) -> torch.Tensor:
        t = t * 2
        assert t.requires_grad
        return funcol.all_to_all_single_autograd(t, [1] * size, [1] * size, name) + 0

    out = prepared(exchange)(t, size)
    assert out.requires_grad
    same(out, torch.full_like(t, 2.0).detach())
    out.sum().backward()
    same(t.grad, torch.full((size, 2), 2.0))


def differentiated_all_gather(prepared: Callable[[Function], Function]) -> None:
    size, name = dist.get_world_size(), world().group_name

    def gather(t: torch.Tensor, dim: int) -> torch.Tensor:
        return funcol.all_gather_tensor_autograd(t * 1.0, gather_dim=dim, group=name) * 1.0

    function = prepared(gather)
    for dim in range(3):
        t = torch.ones((3, 3, 3), requires_grad=True)
        out = function(t, dim)
        shape = [3, 3, 3]
        shape[dim] *= size
        same(out, torch.ones(shape))
        out.sum().backward()
        same(t.grad, torch.full((3, 3, 3), float(size)))


def differentiated_reduce_scatter(prepared: Callable[[Function], Function]) -> None:
    size, name = dist.get_world_size(), world().group_name

    def scatter(t: torch.Tensor, dim: int) -> torch.Tensor:
        return funcol.reduce_scatter_tensor_autograd(t * 1.0, "sum", scatter_dim=dim, group=name) * 1.0

    function = prepared(scatter)
    for dim in range(2):
        shape = [3, 3]
        shape[dim] *= size
        t = torch.ones(shape, requires_grad=True)
        out = function(t, dim)
        same(out, torch.full((3, 3), float(size)))
        out.sum().backward()
        same(t.grad, torch.ones(shape))


def differentiated_all_reduce(prepared: Callable[[Function], Function]) -> None:
    size, name = dist.get_world_size(), world().group_name
    t = torch.ones(3, requires_grad=True)

    def reduce(t: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce_autograd(t * 2, "sum", name) * funcol.all_reduce(t, "max", name)

    prepared(reduce)(t).sum().backward()
    same(t.grad, torch.full((3,), 2.0 * size))


@pytest.mark.parametrize("prepared", [compiled, as_it_is])
@pytest.mark.parametrize(
    "body",
    [
        differentiated_all_to_all,
        differentiated_all_gather,
        differentiated_reduce_scatter,
        differentiated_all_reduce,
    ],
)
def test_gradients_of_compiled_programs(
    body: Callable[[Callable[[Function], Function]], None], prepared: Callable[[Function], Function]
) -> None:
    run(kind_that_compiles(), 2, body, prepared)


def every_kind_of_group() -> None:
    """In one compiled function, groups as arguments, from outside, and made while it is traced."""
    mesh = dist.DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]

    def f(t: torch.Tensor, group: dist.ProcessGroup, mesh: dist.DeviceMesh) -> list[torch.Tensor]:
        return [
            funcol.all_reduce(t, "sum", group),
            funcol.all_reduce(t, "sum", (mesh, "dp")),
            funcol.all_reduce(t, "sum", tp),
            funcol.all_reduce(t, "sum", [0, 1, 2, 3]),
            funcol.all_reduce(t, "sum", [0, 1, 2, 3], "a tag"),
            *funcol.all_reduce_coalesced([t, t + 1], "sum", group),
            *funcol.all_gather_into_tensor_coalesced([t], (mesh, 0)),
            *funcol.reduce_scatter_tensor_coalesced([t.expand(4, 1)], "sum", [0], group),
            funcol.broadcast(t, 2, group),
            funcol.permute_tensor(t, [1, 2, 3, 0], group),
        ]

    t = torch.tensor([float(dist.get_rank())])
    expected = [result + 0 for result in f(t, world(), mesh)]
    function = torch.compile(f, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for result, each in zip(function(t, world(), mesh), expected, strict=True):
            same(result, each)


def test_every_kind_of_group_in_a_compiled_program() -> None:
    run("threads", 4, every_kind_of_group)


def compiled_once() -> int:
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")  # type: ignore[no-untyped-call]
    group = world()

    def f(t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return funcol.all_reduce(t, "sum", group) * 2

    function = torch.compile(f, fullgraph=True, backend=counted)
    for _ in range(3):
        assert function(torch.ones(2), group).tolist() == [4.0, 4.0]
    return int(counted.frame_count)


def test_a_group_as_argument_does_not_compile_anew() -> None:
    assert run("threads", 2, compiled_once) == [1, 1]


def unused_result() -> None:
    name = world().group_name

    def f(t: torch.Tensor) -> torch.Tensor:
        funcol.all_reduce(t, "sum", name)
        return t + 1

    graphs: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Function:
        graphs.append(str(gm.graph))
        return gm.forward

    torch.compile(f, fullgraph=True, backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=backend))(
        torch.ones(2)
    )
    assert graphs[0].count("wait_tensor.default") == 1


def test_a_collective_takes_place_though_nobody_uses_its_result() -> None:
    run("threads", 2, unused_result)


def eager_result_as_input() -> None:
    """A tensor an eager collective is still writing may be handed to a compiled function, which waits."""
    result = funcol.all_reduce(torch.ones(3), "sum", world())
    assert type(result) is funcol.AsyncCollectiveTensor
    same(torch.compile(lambda t: t * 2, fullgraph=True, backend="aot_eager")(result), torch.full((3,), 4.0))


def test_an_eager_result_may_be_an_input() -> None:
    run("threads", 2, eager_result_as_input)


def another_world(expected: str | None) -> None:
    x = torch.ones(1)
    if expected is None:
        assert gather_by_name(x).shape == (dist.get_world_size(),)
    else:
        with pytest.raises(ValueError, match=expected):
            gather_by_name(x)


@torch.compile(fullgraph=True, backend="aot_eager")
def gather_by_name(t: torch.Tensor) -> torch.Tensor:
    return funcol.all_gather_tensor(t, 0, "default")


def test_a_program_compiled_for_another_world_says_so() -> None:
    run("threads", 2, another_world, None)
    run("threads", 3, another_world, "compiled for a group of 2 ranks, and group 'default' has 3 now")


def of_any_shape() -> None:
    group = world()
    size = group.size()

    def f(t: torch.Tensor, splits: list[int]) -> list[torch.Tensor]:
        return [
            funcol.all_gather_tensor(t, 1, group),
            funcol.reduce_scatter_tensor(t, "sum", 0, group),
            funcol.all_to_all_single(t, splits, splits, group),
        ]

    function = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 4, 6):
        t = torch.arange(rows * 3.0).view(rows, 3)
        splits = [rows // size] * size
        for result, expected in zip(function(t, splits), f(t, splits), strict=True):
            same(result, expected + 0)


def test_shapes_may_change() -> None:
    run("threads", 2, of_any_shape)


# -- exported


class Normalised(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y / funcol.all_reduce(y.abs().sum(0), "sum", self.name)


def exported() -> None:
    torch.manual_seed(0)
    module, x = Normalised(world().group_name), torch.rand(3, 4)
    program = torch.export.export(module, (x,), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert (
        targets.count("torchestra.all_reduce.default") == targets.count("torchestra.wait_tensor.default") == 1
    )
    same(program.module()(x), module(x).detach() + 0)
    lowered = program.run_decompositions()
    same(lowered.module()(x), module(x).detach() + 0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_export() -> None:
    run("threads", 1, exported)


# -- the fake world


def test_a_rank_of_a_large_fake_world_traces_alone() -> None:
    dist.init_process_group("fake", rank=5, world_size=8, store=dist.FakeStore())
    try:
        x = torch.rand(8)
        eager = funcol.all_reduce(x, "sum", world())
        same(
            torch.compile(lambda t: funcol.all_reduce(t, "sum", world().group_name), backend="aot_eager")(x),
            eager + 0,
        )
        graph = make_fx(lambda t: funcol.all_gather_tensor(t, 0, world()))(x)
        assert graph(x).shape == (64,)
    finally:
        dist.destroy_process_group()
