"""Gradients of programs on several workers are those of the same programs on one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from crossings import WAYS, Call, assert_same, compare, leaf, local_gradients, sparse_leaf, sync, total

import rpc_workers
from torchestra import autograd, rpc
from torchestra.rpc.current import current_agent

Tensors = list[torch.Tensor]


def add_there(call: Call, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    return [call(1, torch.add, a, b)]


def round_trips(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Tensors:
    value = call(1, torch.add, a, b.detach())
    value = call(2, torch.mul, c, value)
    one, two = call(1, torch.stack, (b, value)), call(2, torch.stack, (c, value))
    return [call(0, torch.mul, one, two)]


def dims(call: Call, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    value = call(1, torch.matmul, a, torch.ones(6, 5))
    return [call(2, torch.linalg.multi_dot, (value, b, torch.ones(7, 9)))]


def some_of_many(call: Call, a: torch.Tensor) -> Tensors:
    parts = call(1, torch.split, a, 2)
    return [call(2, torch.linalg.multi_dot, (parts[0], parts[2], parts[4]))]


def narrowed(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Tensors:
    stacked = call(1, torch.stack, (a, b, c))
    return [call(2, torch.matmul, stacked.narrow(0, 0, 1), stacked.narrow(0, 2, 1))]


def several_roots(call: Call, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    return [
        call(1, torch.add, a, b),
        call(2, torch.mul, a, b),
        call(1, torch.cos, a),
        call(2, torch.div, a, b),
    ]


def two_dtypes(call: Call, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    return [call(1, torch.add, a, b)]


def nested(worker: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product, added = a * b, a + b
    if worker < 3:
        result = rpc.rpc_sync(worker, nested, (worker + 1, product, added))
    else:
        result = torch.add(product, added)
    return a * product * added * result


def nested_here(worker: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product, added = a * b, a + b
    result = nested_here(worker + 1, product, added) if worker < 3 else torch.add(product, added)
    return a * product * added * result


def chain(call: Call, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    return [nested_here(0, a, b) if call.__name__ == "here" else call(1, nested, 0, a, b)]


def without_calls(_: Call, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    return [a + b]


def twice_the_same(call: Call, a: torch.Tensor) -> Tensors:
    return [call(1, torch.mul, a, a)]


def programs() -> None:
    compare(add_there, leaf(3, 3), leaf(3, 3))
    compare(round_trips, leaf(3, 3), leaf(3, 3), leaf(3, 3))
    compare(dims, leaf(4, 6), leaf(5, 7))
    compare(some_of_many, leaf(10, 2))
    compare(narrowed, leaf(3, 3), leaf(3, 3), leaf(3, 3))
    compare(several_roots, leaf(3, 3), leaf(3, 3))
    compare(two_dtypes, leaf(3, 3), leaf(3, 3, dtype=torch.float64))
    compare(chain, leaf(3, 3), leaf(3, 3))
    compare(without_calls, leaf(3, 3), leaf(3, 3))
    compare(twice_the_same, leaf(3, 3))
    compare(add_there, leaf(300, 300), leaf(300, 300))


def test_programs_with_every_way_to_call(kind: str) -> None:
    rpc_workers.first(kind, 3, programs)


def sparse_programs() -> None:
    compare(add_there, sparse_leaf(), sparse_leaf())
    compare(two_dtypes, sparse_leaf(torch.float32), sparse_leaf(torch.float64))
    compare(round_trips, sparse_leaf(), sparse_leaf(), sparse_leaf())
    compare(chain, sparse_leaf(), sparse_leaf())
    compare(without_calls, sparse_leaf(), sparse_leaf())


def test_sparse_tensors_and_gradients(kind: str) -> None:
    rpc_workers.first(kind, 3, sparse_programs)


# -- programs made up at random

OPERATIONS: list[Callable[..., Any]] = [torch.add, torch.mul, torch.sub, torch.maximum]


def apply_there(steps: list[tuple[Any, ...]], way: int, *values: torch.Tensor) -> Any:
    """Do steps, of which some are calls; two results, of which the caller may not use one."""
    pool = list(values)
    for operation, worker, one, other, inner in steps:
        first, second = pool[one % len(pool)], pool[other % len(pool)]
        if worker is None:
            pool.append(OPERATIONS[operation](first, second).tanh())
        elif way < 0:
            pool.extend(apply_there(inner, way, first, second))
        else:
            pool.extend(WAYS[way](worker, apply_there, inner, (way + 1) % 3, first, second))
    return pool[-1], pool[len(pool) // 2] * 2


def made_up(source: random.Random, depth: int) -> list[tuple[Any, ...]]:
    """Steps: an operation, where, of what, and what steps are done there."""
    return [
        (
            source.randrange(len(OPERATIONS)),
            source.choice([None, 0, 1, 2]) if depth else None,
            source.randrange(100),
            source.randrange(100),
            made_up(source, depth - 1) if depth else [],
        )
        for _ in range(source.randint(1, 4))
    ]


def random_programs(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 25):
        source = random.Random(seed)
        steps = made_up(source, 2)
        leaves = [leaf(3) for _ in range(3)]
        uses_both = source.random() < 0.5

        def program(call: Call, *values: torch.Tensor, steps: Any = steps, both: bool = uses_both) -> Tensors:
            way = -1 if call.__name__ == "here" else 0
            one, other = apply_there(steps, way, *values)
            return [one, other] if both else [one]

        compare(program, *leaves, ways=[sync])


def test_random_programs_in_which_results_are_left_unused() -> None:
    rpc_workers.first("threads", 3, random_programs, 0)


# -- what happens in remote functions


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


weights = [torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_() for _ in range(2)]


def block(value: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.nn.functional.linear(value, weights[0], weights[1][0]))


def with_custom_function(value: torch.Tensor) -> torch.Tensor:
    return Triple.apply(block(Triple.apply(value)))


def with_checkpoint(value: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(block, value, use_reentrant=reentrant) * 2


def in_place(value: torch.Tensor) -> torch.Tensor:
    value = value * 2
    value.mul_(3)
    value[0].add_(value[1])
    return value.relu_()


def in_place_on_received(value: torch.Tensor) -> torch.Tensor:
    return value.mul_(3).add_(1)


def gradient_of_weights(context_id: int) -> list[torch.Tensor | None]:
    found = autograd.get_gradients(context_id)
    assert all(weight.grad is None for weight in weights)
    return [found.get(weight) for weight in weights]


def remote_functions() -> None:
    value = leaf(3, 3)
    for function, arguments in (
        (with_custom_function, ()),
        (with_checkpoint, (False,)),
        (with_checkpoint, (True,)),
        (in_place, ()),
    ):

        def program(call: Call, *leaves: torch.Tensor, fn: Any = function, args: Any = arguments) -> Tensors:
            return [call(1, fn, leaves[0], *args)]

        expected = local_gradients(program, [value, *weights])
        with autograd.context() as context_id:
            loss = program(sync, value)[0].sum()
            autograd.backward(context_id, [loss])
            assert_same(autograd.get_gradients(context_id)[value], expected[0])
            there = rpc.rpc_sync(1, gradient_of_weights, (context_id,))
        for found, right in zip(there, expected[1:], strict=True):
            assert_same(found, right)
    with autograd.context() as context_id:
        received = rpc.rpc_sync(1, in_place_on_received, (value,))
        received.mul_(2)
        autograd.backward(context_id, [received.sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[value], torch.full((3, 3), 6.0))


def test_custom_functions_checkpoints_and_in_place_operations(kind: str) -> None:
    rpc_workers.first(kind, 2, remote_functions)


# -- hooks

heard: list[str] = []


def hooked(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inner = value * 2
    inner.register_hook(lambda gradient: heard.append("inner") or gradient * 10)
    both = rpc.rpc_sync(0, torch.mul, (inner, 1))  # inner is used by two sends: its hook must run once
    weights[0].register_hook(lambda gradient: heard.append("weight"))
    return inner + both, weights[0] * inner


def what_was_heard() -> list[str]:
    found = sorted(heard)
    heard.clear()
    return found


def hooks() -> None:
    value = leaf(3, 3)
    value.register_hook(lambda gradient: gradient * 7)
    with autograd.context() as context_id:
        one, other = rpc.rpc_sync(1, hooked, (value,))
        autograd.backward(context_id, [one.sum() + other.sum()])
        found = autograd.get_gradients(context_id)[value]
    assert rpc.rpc_sync(1, what_was_heard) == ["inner", "weight"]
    torch.testing.assert_close(found, (2 + weights[0].detach()) * 2 * 10 * 7)


def test_every_hook_runs_once_also_where_several_messages_meet() -> None:
    rpc_workers.first("processes", 2, hooks)


# -- references


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def add_to_value(rref: rpc.RRef, other: torch.Tensor) -> torch.Tensor:
    return rref.local_value() + other * 2


def add_by_way_of(owner: int, rref: rpc.RRef, other: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(owner, add_to_value, (rref, other))


def gradient_of(context_id: int, rref: rpc.RRef) -> torch.Tensor:
    return autograd.get_gradients(context_id)[rref.local_value()]


def references() -> None:
    other = leaf(3, 3)
    for owner in (0, 1):
        for callee in (0, 1, 2):
            with autograd.context() as context_id:
                rref = rpc.remote(owner, ones, (3, 3))
                if callee == owner:
                    result = rpc.remote(callee, add_to_value, (rref, other)).to_here()
                else:
                    result = rpc.remote(callee, add_by_way_of, (owner, rref, other)).to_here()
                autograd.backward(context_id, [result.sum()])
                torch.testing.assert_close(autograd.get_gradients(context_id)[other], torch.full((3, 3), 2.0))
                assert torch.equal(rpc.rpc_sync(owner, gradient_of, (context_id, rref)), torch.ones(3, 3))


def test_values_of_references_take_part(kind: str) -> None:
    rpc_workers.first(kind, 3, references)


def fetched() -> None:
    module = rpc.remote(1, torch.nn.Linear, (3, 2))
    value = leaf(4, 3)
    with autograd.context() as context_id:
        result = module.rpc_sync().forward(value) + module.rpc_async().forward(value).wait()
        result = result + module.remote().forward(value).to_here()
        autograd.backward(context_id, [result.sum()])
        found = autograd.get_gradients(context_id)[value]
        there = rpc.rpc_sync(1, gradients_of_module, (context_id, module))
    weight, bias = module.to_here().parameters()
    torch.testing.assert_close(found, 3 * weight.sum(0).expand(4, 3))
    torch.testing.assert_close(there[0], 3 * value.sum(0).expand(2, 3))
    torch.testing.assert_close(there[1], torch.full((2,), 12.0))
    assert bias.grad is None


def gradients_of_module(context_id: int, module: rpc.RRef) -> list[torch.Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[parameter] for parameter in module.local_value().parameters()]


def test_methods_of_references_take_part() -> None:
    rpc_workers.first("threads", 2, fetched)


@rpc.functions.async_execution
def add_and_double_elsewhere(one: torch.Tensor, other: torch.Tensor) -> Any:
    added = rpc.rpc_async(2, torch.add, (one, other))
    return added.then(lambda done: rpc.rpc_sync(0, torch.mul, (done.value(), 2)))


def in_callbacks() -> None:
    one, other = leaf(3), leaf(3)
    for way in WAYS:
        with autograd.context() as context_id:
            autograd.backward(context_id, [way(1, add_and_double_elsewhere, one, other).sum()])
            found = autograd.get_gradients(context_id)
            assert found[one].tolist() == found[other].tolist() == [2, 2, 2]


def test_what_callbacks_of_calls_call_takes_part() -> None:
    rpc_workers.first("threads", 3, in_callbacks)


# -- what is sent


def product(value: dict[str, Any]) -> torch.Tensor:
    return value["list"][0] * value["scale"]


def copied(module: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    return module(value)


def parameters() -> None:
    module = torch.nn.Linear(3, 3)
    value = leaf(3)
    with autograd.context() as context_id:
        weighted = rpc.rpc_sync(1, product, ({"list": [module.weight], "scale": value},))
        through_copy = rpc.rpc_sync(1, copied, (module, value))
        autograd.backward(context_id, [weighted.sum() + through_copy.sum()])
        found = autograd.get_gradients(context_id)
    assert set(found) == {module.weight, value}, "the parameters of a module that is sent are copies"
    torch.testing.assert_close(found[module.weight], value.detach().expand(3, 3))
    torch.testing.assert_close(found[value], module.weight.detach().sum(0) * 2)


def test_parameters_take_part_as_arguments_and_are_copied_with_modules() -> None:
    rpc_workers.first("threads", 2, parameters)


def mixed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one - other if other.requires_grad else one * other


def requirements() -> None:
    one, other = leaf(3, 3), torch.rand(3, 3)
    for way in WAYS:
        with autograd.context() as context_id:
            result = way(1, mixed, one, other)
            assert torch.equal(result, one * other)
            autograd.backward(context_id, [result.sum()])
            found = autograd.get_gradients(context_id)
            assert set(found) == {one}
            assert torch.equal(found[one], other)
            with torch.no_grad():
                assert not rpc.rpc_sync(1, torch.mul, (other, 2)).requires_grad
            assert not way(1, torch.mul, other, 2).requires_grad


def test_only_what_requires_gradients_takes_part() -> None:
    rpc_workers.first("threads", 2, requirements)


# -- several passes


def passes() -> None:
    one, other = leaf(3, 3), leaf(3, 3)
    local = local_gradients(lambda call, a, b: [a @ b], [one, other])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(1, torch.matmul, (one, other)).sum()
        for count in (1, 2, 3):
            autograd.backward(context_id, [loss], retain_graph=True)
            found = autograd.get_gradients(context_id)
            torch.testing.assert_close(found[one], local[0] * count)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
        torch.testing.assert_close(found[other], local[1] * 4)
        kept = found[other].clone()
        # Old messages take no part in passes that follow one which has not kept the graph.
        again = rpc.rpc_sync(2, torch.matmul, (one, other)).sum()
        autograd.backward(context_id, [again])
        torch.testing.assert_close(autograd.get_gradients(context_id)[one], local[0] * 5)
        assert torch.equal(found[other], kept), "what was asked for before must not change"
        first = rpc.rpc_sync(1, torch.matmul, (one, other)).sum()
        second = rpc.rpc_sync(2, torch.matmul, (one, other)).sum()
        autograd.backward(context_id, [first], retain_graph=True)
        autograd.backward(context_id, [second])
        torch.testing.assert_close(autograd.get_gradients(context_id)[one], local[0] * 7)
    assert one.grad is None


def test_gradients_of_several_passes_add_up(kind: str) -> None:
    rpc_workers.first(kind, 3, passes)


def beside_local() -> None:
    one = leaf(3, 3)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(1, torch.mul, (one, 3)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        assert one.grad is None
        (one * 2).sum().backward()
        autograd.backward(context_id, [loss])
        assert torch.equal(one.grad, torch.full((3, 3), 2.0))
        torch.testing.assert_close(autograd.get_gradients(context_id)[one], torch.full((3, 3), 6.0))


def test_local_backward_and_distributed_backward_do_not_meet() -> None:
    rpc_workers.first("threads", 2, beside_local)


def embedding_twice() -> None:
    table = rpc.remote(1, torch.nn.EmbeddingBag, (16, 16), {"mode": "sum", "sparse": True})
    indices, offsets, scale = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4]), leaf(8)
    local = torch.nn.EmbeddingBag(16, 16, mode="sum", sparse=True)
    result = local(indices, offsets, scale)
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    with autograd.context() as context_id:
        result = table.rpc_sync().forward(indices, offsets, scale.detach().requires_grad_())
        autograd.backward(context_id, [result.sum()], retain_graph=True)
        autograd.backward(context_id, [result.sum()])
        found = rpc.rpc_sync(1, gradients_of_module, (context_id, table))[0]
    assert_same(found, local.weight.grad)


def test_sparse_gradients_of_a_remote_table_add_up() -> None:
    rpc_workers.first("threads", 2, embedding_twice)


# -- how much is done


def count_posts() -> list[Any]:
    """Have this worker note what it tells others of autograd."""
    agent = current_agent()
    if not hasattr(agent, "told_for_test"):
        agent.told_for_test = []
        tell = agent.send_scope_message

        def tell_and_note(to: int, note: Any) -> None:
            agent.told_for_test.append(note)
            tell(to, note)

        agent.send_scope_message = tell_and_note
    found = list(agent.told_for_test)
    agent.told_for_test.clear()
    return found


class Counted(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return gradient


def rung(value: torch.Tensor) -> torch.Tensor:
    return Counted.apply(value) / 2


def runs() -> int:
    found, Counted.runs = Counted.runs, 0
    return found


def ladder() -> None:
    told = {}
    for depth in (4, 8, 16):
        start = leaf(2)
        value = Counted.apply(start)
        with autograd.context() as context_id:
            for _ in range(depth):
                left, right = (rpc.rpc_async(1, rung, (value,)) for _ in range(2))
                value = Counted.apply(left.wait() + right.wait())
            for worker in (0, 1):
                rpc.rpc_sync(worker, count_posts)
                rpc.rpc_sync(worker, runs)
            autograd.backward(context_id, [value.sum()])
            torch.testing.assert_close(autograd.get_gradients(context_id)[start], torch.ones(2))
        told[depth] = sum(len(rpc.rpc_sync(worker, count_posts)) for worker in (0, 1))
        ran = [rpc.rpc_sync(worker, runs) for worker in (0, 1)]
        assert ran == [depth + 1, 2 * depth], "every node runs once"
    # Two messages per rung and direction, one that tells of the end, one that releases the context.
    assert told == {depth: 4 * depth + 2 for depth in (4, 8, 16)}


def test_a_ladder_takes_a_number_of_messages_linear_in_its_depth() -> None:
    rpc_workers.first("processes", 2, ladder)


class Same(torch.autograd.Function):
    pointer = 0

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        return sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Same.pointer = gradient.data_ptr()
        return gradient if len(ctx.needs_input_grad) == 1 else (gradient,) * len(ctx.needs_input_grad)


def memory() -> None:
    one, other = leaf(5, 6), leaf(5, 6)
    with autograd.context() as context_id:
        autograd.backward(context_id, [Same.apply(one)[1][0]])
        assert autograd.get_gradients(context_id)[one].data_ptr() == Same.pointer, "not copied"
    with autograd.context() as context_id:
        autograd.backward(context_id, [Same.apply(one, other)[1][0]])
        found = autograd.get_gradients(context_id)
        pointers = {found[one].data_ptr(), found[other].data_ptr(), Same.pointer}
        assert len(pointers) == 3, "a gradient of two parameters is copied for both"
    with autograd.context() as context_id:
        autograd.backward(context_id, [Same.apply(one).expand(2, 5, 6).sum()])
        assert autograd.get_gradients(context_id)[one].is_contiguous()
    with autograd.context() as context_id:
        received = rpc.rpc_sync(1, torch.mul, (one, 1))
        autograd.backward(context_id, [total(received + other)])
        assert autograd.get_gradients(context_id)[other].is_contiguous()


def test_a_gradient_is_copied_only_where_others_have_its_memory() -> None:
    rpc_workers.first("threads", 2, memory)
