"""Simulate distributed autograd: contexts of workers that call each other, lose each other, and go backward.

Each worker draws *layers*: what a worker does to a tensor, calls of layers on other workers included, which
call others in turn. Within a context it evaluates one, by all kinds of calls, goes backward, and asks all
workers for their gradients. The same layers are evaluated without workers by torch alone. Meanwhile there are
the faults of :mod:`verification.simulation.rpc`, whose promises hold here too. Checked are:

* where ``backward()`` returns, every worker has the gradients that torch computes, and none else;
* where it does not, the error blames a worker that may have seemed to be gone, or names the one whose
  function has raised in the backward pass;
* every pass ends, and no worker waits for its time-out where nobody was silent for long;
* when all is over no worker has a context, a pass or a message left, after crashes too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchestra import autograd, rpc
from torchestra.autograd.contexts import contexts_of
from torchestra.errors import BackwardError, RpcError
from verification.simulation.rpc import Program, RpcWorld, call_later, name_of, rank_here
from verification.simulation.rpc_calls import DeliberateError
from verification.simulation.world import Plan

_DEPTH = 3
_HOW = ("sync", "sync", "async", "async", "remote", "unused", "left")


class Layer(NamedTuple):
    """What a worker does to a tensor, one part after the other.

    Attributes:
        rank: the worker.
        how: it is called: the caller waits at once (``sync``), or when it has done all else (``async``);
            fetches the result by a reference (``remote``); waits, and does not use the result (``unused``);
            or does not even wait (``left``).
        parts: ``multiply`` or ``add``, with the worker's parameter; ``trap``, which raises in the backward
            pass; a layer, whose result is added.
    """

    rank: int
    how: str
    parts: tuple[Layer | str, ...]

    def traps(self, *, used: bool) -> Iterator[int]:
        """Return the ranks with a trap; or those only that the result depends on."""
        for part in self.parts:
            if part == "trap":
                yield self.rank
            elif isinstance(part, Layer) and not (used and part.how in ("unused", "left")):
                yield from part.traps(used=used)


def drawn_layer(choices: random.Random, size: int, rank: int, depth: int = _DEPTH) -> Layer:
    """Draw a layer of a worker; ``size``: the number of workers."""
    parts: list[Layer | str] = []
    for _ in range(choices.randint(1, 3)):
        if depth and choices.random() < 0.6:
            parts.append(drawn_layer(choices, size, choices.randrange(size), depth - 1))
        else:
            parts.append("trap" if choices.random() < 0.03 else choices.choice(("multiply", "add")))
    return Layer(rank, choices.choice(_HOW), tuple(parts))


class _Trap(torch.autograd.Function):
    """Returns the tensor; raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise DeliberateError("a trap")


Call = Callable[[Layer, torch.Tensor], Callable[[], torch.Tensor]]
"""Calls a layer's worker; returns what waits for the result."""


def evaluate(
    layer: Layer, tensor: torch.Tensor, parameters: Sequence[torch.Tensor], call: Call
) -> torch.Tensor:
    """Do what a layer says."""
    waited = []
    for part in layer.parts:
        if isinstance(part, Layer):
            wait = call(part, tensor)
            if part.how == "async":
                waited.append(wait)
            elif part.how == "unused":
                wait()
            elif part.how != "left":
                tensor = tensor + wait()
        elif part == "trap":
            tensor = _Trap.apply(tensor)  # type: ignore[no-untyped-call]
        elif part == "add":
            tensor = tensor + parameters[layer.rank]
        else:
            tensor = tensor * parameters[layer.rank]
    for wait in waited:
        tensor = tensor + wait()
    return tensor


def expected_gradients(layer: Layer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each worker's parameter, computed by torch alone; None where there is none."""
    leaves = [each.detach().clone().requires_grad_() for each in parameters]

    def call(part: Layer, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: evaluate(part, tensor, leaves, call)

    loss = evaluate(layer, leaves[layer.rank], leaves, call).sum()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


class AutogradWorld(RpcWorld):
    """The workers of one run.

    Attributes:
        parameters: by rank. They are whole numbers, so that sums are exact in any order.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        choices = random.Random(f"{plan.seed} parameters")
        numbers = [[float(choices.randint(1, 3)) for _ in range(2)] for _ in self.ranks]
        self.parameters = [torch.tensor(each, dtype=torch.float64).requires_grad_() for each in numbers]

    def work(self, rank: int) -> None:
        """Make contexts, and calls outside of them."""
        AutogradProgram(self, rank).go()

    def left(self, rank: int) -> dict[str, int]:
        """See :class:`RpcWorld`; contexts and passes count too."""
        counts = contexts_of(self.agents[rank]).counts()
        return super().left(rank) | {name: count for name, count in counts.items() if count}


class AutogradProgram(Program):
    """What one worker does."""

    def __init__(self, world: AutogradWorld, rank: int) -> None:
        super().__init__(world, rank)
        self._parameters = world.parameters

    def actions(self) -> list[Callable[[], None]]:
        """Return what it may do."""
        return [self._train, self._train, self._train, self._call, self._make, self._drop]

    def _train(self) -> None:
        """Evaluate a layer and go backward, in a context."""
        world, choices = self._world, self._choices
        layer = drawn_layer(choices, len(world.ranks), self._rank)
        passes = choices.choice((1, 1, 2))
        what = f"the context of rank {self._rank} with {layer}"
        try:
            with autograd.context() as context_id:
                call = calls_of(self._rank)
                loss = evaluate(layer, self._parameters[self._rank], self._parameters, call).sum()
                if choices.random() < 0.1:
                    return
                for number in range(passes):
                    autograd.backward(context_id, [loss], retain_graph=number < passes - 1)
                if trapped := set(layer.traps(used=True)):
                    world.run.fail(f"{what} went backward through a trap on ranks {trapped}")
                self._check_gradients(context_id, layer, passes)
        except BackwardError as error:
            world.run.note(f"{what}: {str(error).splitlines()[0]}")
            trapped = set(layer.traps(used=False))  # what is not used takes part, as in torch's FAST mode
            if not any(str(error).startswith(f"Error on Node {rank}: a trap") for rank in trapped):
                world.run.fail(f"{what} ended with {error}, and has traps on ranks {trapped}")
        except RpcError as error:
            world.judge_error(what, tuple(range(len(world.ranks))), error)

    def _check_gradients(self, context_id: int, layer: Layer, passes: int) -> None:
        for rank, expected in enumerate(expected_gradients(layer, self._parameters)):
            with torch.no_grad():  # or the call would belong to the context
                found = self._sync(gradient, rank, (context_id,))
            if found is None:
                continue
            wanted = None if expected is None else passes * expected
            if found[0] is None or wanted is None:
                is_right = found[0] is wanted
            else:
                is_right = torch.equal(found[0], wanted)
            if not is_right:
                self._world.run.fail(
                    f"rank {rank} has the gradient {found[0]}, not {wanted}, in a context of"
                    f" rank {self._rank} with {layer}"
                )


def calls_of(by: int) -> Call:
    """Return what calls layers from a worker."""

    def call(layer: Layer, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        world = RpcWorld.current
        token = world.new_call(by, layer.rank, "forward")
        if layer.how != "remote":
            wait: Callable[[], torch.Tensor] = call_later(token, forward, layer.rank, layer, tensor).wait
            return wait
        world.calls[token].ended = 1  # nobody waits for it
        fetch: Callable[[], torch.Tensor] = rpc.remote(
            name_of(layer.rank), forward, (token, layer, tensor)
        ).to_here
        return fetch

    return call


# Functions that are called. The first argument is the number of the call.


def forward(token: int, layer: Layer, tensor: torch.Tensor) -> torch.Tensor:
    """Do what a layer says, on its worker."""
    world = RpcWorld.current
    assert isinstance(world, AutogradWorld)
    world.begin(token)
    return evaluate(layer, tensor, world.parameters, calls_of(rank_here()))


def gradient(token: int, context_id: int) -> tuple[torch.Tensor | None]:
    """Return the gradient of this worker's parameter, None if it has none."""
    world = RpcWorld.current
    assert isinstance(world, AutogradWorld)
    world.begin(token)
    try:
        return (autograd.get_gradients(context_id).get(world.parameters[rank_here()]),)
    except RpcError:  # no call within the context has come here
        return (None,)
