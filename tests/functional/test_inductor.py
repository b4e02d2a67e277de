"""Programs compiled by Inductor: each collective and wait once, nothing copied in vain, and overlap."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import utils
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import torchestra as dist
import torchestra.functional as funcol
from torchestra.functional.inductor import Overlap
from worlds import kind_that_compiles, run

# Of an older name in torch 2.6.
FRESH_CACHE: Any = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
P2P = "enable_p2p_compilation"  # since torch 2.12
_EXCHANGE = "torch.ops.torchestra.all_to_all_single.default("
_REDUCE = "torch.ops.torchestra.all_reduce_.default("
_WAIT = "torch.ops.torchestra.wait_tensor.default("


@pytest.fixture
def _compiled_anew() -> Any:
    """Compile without a cache: what Inductor keeps on the disk hides a change of our lowering."""
    torch.compiler.reset()
    with FRESH_CACHE():
        yield


def call_of(code: str) -> str:
    """Return what generated code does when it is called."""
    return code[code.index("def call(") : code.index("runner =")]


def exchange_and_overlap() -> None:
    """A program with a compiled backward, and one with something to compute meanwhile."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    name = group.group_name
    dist.barrier()

    def exchange(t: torch.Tensor) -> torch.Tensor:
        out = funcol.all_to_all_single_autograd(t * 10, [1] * size, [1] * size, name)
        return (out + 2).sum()

    t = torch.rand((size, 2), requires_grad=True)
    result = torch.compile(exchange, fullgraph=True)(t)
    result.backward()
    rows = funcol.all_to_all_single(t.detach() * 10, None, None, group) + 2
    torch.testing.assert_close(result.detach(), rows.sum())
    torch.testing.assert_close(t.grad, torch.full((size, 2), 10.0))

    def overlapping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        independent = torch.relu(w @ w)
        total = funcol.all_reduce(x * 2, "sum", name)
        return independent @ w + total

    x, w = torch.full((4, 4), float(rank)), torch.eye(4)
    result = torch.compile(overlapping, fullgraph=True)(x, w)
    torch.testing.assert_close(result, torch.eye(4) + sum(range(size)) * 2)
    dist.barrier()


def generated_code() -> list[str]:
    """Collected by one rank, from all: which of them compiles what both then use, is not told."""
    if dist.get_rank() == 0:
        return [call_of(code) for code in run_and_get_code(exchange_and_overlap)[1]]
    exchange_and_overlap()
    return []


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_compiled_anew")
def test_generated_code() -> None:
    if kind_that_compiles() != "threads":
        pytest.skip("this torch does not compile in two threads at once")
    codes = run("threads", 2, generated_code, timeout=500.0, limit=550.0)[0]
    exchanges = [code for code in codes if _EXCHANGE in code]
    assert len(exchanges) >= 2, "forward and backward"
    for code in exchanges:
        assert code.count(_EXCHANGE) == code.count(_WAIT) == 1
        assert code.index(_EXCHANGE) < code.index(_WAIT)
    reductions = [code for code in codes if _EXCHANGE not in code]
    assert reductions
    for code in reductions:
        assert code.count(_REDUCE) == code.count(_WAIT) == 1
        products = [index for index in range(len(code)) if code.startswith("extern_kernels.", index)]
        assert len(products) == 2
        assert code.index(_REDUCE) < products[0], "the collective is begun before what does not need it"
        assert products[1] < code.index(_WAIT), "and waited for after"
        assert "clone" not in code
        assert "all_reduce.default" not in code, "what only the collective reads is reduced in place"


def test_the_cpp_wrapper_is_refused() -> None:
    """Its kernels for waits know nothing of our collectives, and would return at once."""
    torch.compiler.reset()
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        function = torch.compile(
            lambda t: funcol.all_reduce(t, "sum", "default") + 1, options={"cpp_wrapper": True}
        )
        with pytest.raises(Exception, match="compile with cpp_wrapper=False"):
            function(torch.ones(3))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_compiled_anew", "name")
@pytest.mark.skipif(not hasattr(torch._dynamo.config, P2P), reason="this torch traces no messages")
def test_messages_and_collectives_keep_their_order() -> None:
    """Also where no data goes from one to the next: the peer's program is another, and has an order too."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        received, more = torch.empty_like(x), torch.empty_like(x)
        swapped = funcol.all_to_all_single(x, None, None, "default")
        work = dist.irecv(received, 1)
        dist.send(x, 1)
        dist.recv(more, 1)
        gathered = funcol.all_gather_tensor(x, 0, "default")
        assert work is not None
        work.wait()
        return [received, more, gathered, swapped]

    dynamo_config: Any = torch._dynamo.config
    with dynamo_config.patch(P2P, True):
        _, (code,) = run_and_get_code(torch.compile(program, fullgraph=True), torch.ones(2))
    begun = re.findall(r"torch\.ops\.torchestra\.(\w+)\.default\(", call_of(code))
    assert [each for each in begun if each != "wait_tensor"] == [
        "all_to_all_single",
        "begin_receive",
        "begin_send",
        "end_send",
        "begin_receive",
        "end_receive",
        "all_gather_into_tensor",
        "end_receive",
    ]
    assert begun.count("wait_tensor") == 2


# -- the pass, on graphs


def arranged(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    """The operators of a function's graph, in their order after the pass."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    before = gm(*inputs)
    Overlap().apply(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), before)
    return [
        str(node.target).removeprefix("aten.").removeprefix("torchestra.").split(".")[0]
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]


@pytest.fixture
def name() -> Any:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield "default"
    dist.destroy_process_group()


def test_collectives_are_begun_early_and_waited_for_late(name: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(w)
        first = funcol.all_reduce(x, "sum", name)
        z = torch.sin(y)
        second = funcol.all_reduce(y, "sum", name)
        return z + second + first

    order = arranged(program, torch.rand(2), torch.rand(2))
    assert order == ["all_reduce", "relu", "all_reduce", "sin", "wait_tensor", "add", "wait_tensor", "add"]


def test_collectives_keep_their_order(name: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = funcol.all_reduce(torch.sin(x), "sum", name)
        second = funcol.all_gather_tensor(w, 0, name)
        return torch.cat([first, second])

    order = arranged(program, torch.rand(2), torch.rand(2))
    assert order == ["sin", "all_reduce", "all_gather_into_tensor", "wait_tensor", "wait_tensor", "cat"]


def test_nothing_is_moved_past_a_change(name: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = funcol.all_reduce(x, "sum", name)
        x.add_(1)
        second = funcol.all_reduce(x, "sum", name)
        w.mul_(2)
        return first + second

    gm = make_fx(program, tracing_mode="fake")(torch.rand(2), torch.rand(2))
    order = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    Overlap().apply(gm.graph)
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == order


def test_a_product_does_not_wait_for_what_is_added_to_it(name: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.addmm(funcol.all_reduce(x, "sum", name), w, w)

    order = arranged(program, torch.rand(2, 2), torch.rand(2, 2))
    assert order == ["all_reduce", "mm", "wait_tensor", "add"]


def test_graphs_without_collectives_stay_as_they_are() -> None:
    gm = make_fx(lambda x: torch.relu(x) + 1)(torch.rand(2))
    nodes = list(gm.graph.nodes)
    assert Overlap().apply(gm.graph) == 0
    assert list(gm.graph.nodes) == nodes
    assert isinstance(gm, fx.GraphModule)
