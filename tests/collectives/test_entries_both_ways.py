"""Operations give by their entries what the general way gives: the same bits, or the same errors.

The operations are those that have entries, and their arguments those of their rows of the table: a new entry
is tested without a line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_frames import needs_entries

import torchestra as dist
from torchestra.communicator.entries import MESSAGES, SERVED, LazyEntry
from torchestra.engine.operations import Collective, Parameter, Shape
from torchestra.types import ReduceOp
from worlds import run

pytestmark = needs_entries

ROWS = {served.method: served.row for served in SERVED}
LIST = "all_reduce_list"  # takes a list in place, which no row tells
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
OPS = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.BXOR, ReduceOp.premul_sum(0.5)]


class Subclass(torch.Tensor):
    pass


def shortened(tensor: torch.Tensor, part: int) -> torch.Tensor:
    """Return a tensor with a part of its memory; 0: with none."""
    made = tensor.clone()
    made.untyped_storage().resize_(made.untyped_storage().nbytes() // part if part else 0)
    return made


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda tensor: torch.cat([tensor, tensor])[tensor.shape[0] :],
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "backwards": lambda tensor: tensor.reshape(1, -1).t().flip(0),
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "stacked": lambda tensor: tensor.reshape(-1, 1),
    "scalar": lambda tensor: tensor.reshape(()) if tensor.numel() == 1 else tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "subclass": lambda tensor: tensor.as_subclass(Subclass),
    "negative": lambda tensor: torch._neg_view(tensor) if tensor.dtype.is_floating_point else tensor,
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "short": lambda tensor: shortened(tensor, 2),
    "freed": lambda tensor: shortened(tensor, 0),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "converted": lambda tensor: torch.ones(tensor.shape, dtype=torch.int32),
    "longer": lambda tensor: torch.cat([tensor, tensor, tensor[:1]]),
    "none": lambda tensor: None,  # type: ignore[dict-item, return-value]
}
PLAIN = "plain"
HARMLESS = ("offset", "strided", "backwards", "stacked", "parameter", "subclass")


class Case(NamedTuple):
    """A call; the same on all ranks, but for the values, and what only the root gives.

    Attributes:
        method: the communicator's.
        forms: of the output and the input, or of the first and the other tensors of a list.
        count: of elements, of what there is one of for each rank.
        alias: how output and input share memory: "no", "same" (all of it), or "part".
        listed: what becomes of a list.
        seconds: the time-out; "" leaves it out.
    """

    method: str
    forms: tuple[str, str]
    dtype: torch.dtype
    count: int
    op: ReduceOp
    root: int
    alias: str
    listed: str
    seconds: Any


FORM = st.sampled_from([PLAIN] * len(FORMS) + list(FORMS))
LISTED: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "one short": lambda tensors: tensors[:-1],
    "one twice": lambda tensors: [tensors[0]] * len(tensors),
    "missing": lambda tensors: None,
}
CASES = st.builds(
    Case,
    st.sampled_from([*ROWS, *MESSAGES]),
    st.tuples(FORM, FORM),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 2, 3, 17, 1000]),
    st.sampled_from(OPS),
    st.integers(0, 2),
    st.sampled_from(["no", "no", "same", "part"]),
    st.sampled_from(["list"] * 4 + list(LISTED)),
    st.sampled_from(["", None, 9.0]),
)


def values(case: Case, salt: int, number: int) -> torch.Tensor:
    return ((torch.arange(number) * 7 + dist.get_rank() * 5 + salt * 3) % 11 + 0.25).to(case.dtype)


def given_as(case: Case, place: int, parameter: Parameter, whole: bool, is_root: bool) -> Any:
    """Return the output (place 0) or the input (1): a tensor, or one for each rank."""
    size = dist.get_world_size()
    form = FORMS.get(case.forms[place], lambda tensor: tensor)
    if not parameter.is_list:
        return form(values(case, place, case.count * (size if whole else 1)))
    if parameter.on_root and not is_root:
        return None if case.listed != "one twice" else []
    return LISTED[case.listed]([form(values(case, 10 * place + peer, case.count)) for peer in range(size)])


def on_all_alike(case: Case, size: int) -> Case:
    """Return the case as it is the same on all ranks: what only the root gives is not wrong."""
    case = case._replace(root=case.root % size)
    row = ROWS.get(case.method)
    if size == 1 or row is None or row.output is None or not (row.output.on_root or row.input.on_root):
        return case
    forms = [form if form in HARMLESS else PLAIN for form in case.forms]
    return case._replace(forms=tuple(forms), listed="tuple" if case.listed == "tuple" else "list")


def shared(case: Case, output: Any, other: Any) -> Any:
    """Return an input that shares memory with the output, where both are such that it can."""
    if case.alias == "no" or not all(torch.is_tensor(each) for each in (output, other)):
        return other
    if case.alias == "same" or output.dim() == 0 or output.layout is not torch.strided:
        return output
    return output[: other.numel()]


def arguments_of(case: Case) -> list[Any]:
    """Return what a collective's method is called with, by its row."""
    row: Collective = ROWS[case.method]
    is_root = case.root == dist.get_rank()
    given: list[Any] = []
    if case.method == LIST:
        forms = [FORMS.get(form, lambda tensor: tensor) for form in case.forms]
        given = [[form(values(case, place, case.count)) for place, form in enumerate(forms)]]
    elif row.output is not None and row.input is not None:
        shape = row.shape
        given = [given_as(case, 0, row.output, shape in (Shape.OUTPUT_IS_WHOLE, Shape.ROWS), is_root)]
        if not row.in_place:
            whole = shape in (Shape.INPUT_IS_WHOLE, Shape.ROWS)
            given.append(shared(case, given[0], given_as(case, 1, row.input, whole, is_root)))
    given += [case.op] * row.reduces + [case.root] * bool(row.root) + [None, None] * row.splits
    return given if case.seconds == "" else [*given, False, case.seconds]


def bits(value: Any) -> Any:
    """Return what is in the tensors of some arguments; nothing of those without memory."""
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    if not torch.is_tensor(value) or value.is_meta:
        return None
    if value.is_sparse:
        return str(value.to_dense())
    if value.untyped_storage().nbytes() < (value.storage_offset() + value.numel()) * value.itemsize:
        return "short"
    return repr(value.detach().tolist())


def message(communicator: Any, case: Case) -> list[Any]:
    """Send to the next rank and receive from the one before, one of both with the case's tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = given_as(case, 0, Parameter("tensor"), False, True)
    other = torch.zeros(case.count, dtype=case.dtype)
    sends = case.method == "send"
    try:
        communicator.send(tensor if sends else other, (rank + 1) % size, 7)
    except Exception:
        if sends:
            raise
    faked = torch.is_tensor(tensor) and tensor.is_meta  # of which nothing is sent, and no message is taken
    if faked and sends:
        return [tensor]
    source = None if case.listed == "tuple" else (rank - 1) % size
    if faked:
        communicator.recv(tensor, source, 7)
        tensor = other
    try:
        communicator.recv(other if sends else tensor, source, 7)
    except dist.DistBackendError:
        raise  # the message did not fit, and was thrown away
    except Exception:
        communicator.recv(other, source, 7)  # which the refused receive has left
        raise
    return [tensor, other]


def outcome_of(communicator: Any, case: Case) -> Any:
    """Call the communicator's method of now; what came of it."""
    try:
        if case.method in MESSAGES:
            return bits(message(communicator, case))
        arguments = arguments_of(case)
        result = getattr(communicator, case.method)(*arguments)
    except Exception as error:
        return type(error).__name__, re.sub(r"number \d+ of", "number _ of", str(error))
    return result, bits(arguments)


@contextmanager
def without_entries(communicator: Any) -> Iterator[None]:
    entries = {name: vars(communicator).pop(name) for name in (*ROWS, *MESSAGES)}
    assert {type(entry) for entry in entries.values()} <= {type(len), LazyEntry}
    try:
        yield
    finally:
        vars(communicator).update(entries)


def compare(cases: list[Case]) -> None:
    communicator: Any = dist.group.WORLD.communicator
    for case in cases:
        found = [
            outcome_of(communicator, case) for _ in range(3)
        ]  # the first of a kind may go the general way
        with without_entries(communicator):
            expected = outcome_of(communicator, case)
        assert found == [expected] * 3, case
        assert not communicator.engine.is_aborted, case
    assert communicator.queue.state.inside == communicator.queue.state.general == 0


@pytest.mark.parametrize("size", [1, 2, 3])
@settings(max_examples=8, deadline=None, phases=[Phase.generate], database=None)
@given(st.lists(CASES, min_size=1, max_size=50))
def test_both_ways_give_the_same_bits_and_the_same_errors(size: int, cases: list[Case]) -> None:
    run("threads", size, compare, [on_all_alike(case, size) for case in cases], timeout=5.0)


def test_a_list_of_two_dtypes_is_refused_by_both_ways() -> None:
    """Its kernel would write elements of one dtype into a tensor of the other, which may be shorter."""
    forms = (PLAIN, "converted")
    case = Case(LIST, forms, torch.float64, 17, ReduceOp.SUM, 0, "no", "list", "")

    def refused() -> None:
        compare([case])
        kind, text = outcome_of(dist.group.WORLD.communicator, case)
        assert kind == "InvalidArgumentTypeError"
        assert "`tensors[1]` must be torch.float64" in text

    run("threads", 2, refused)


def test_lists_of_uneven_tensors_are_exchanged_by_their_entry() -> None:
    """Each pair of ranks has a length of its own, and a piece in the middle of one shared tensor."""

    def exchange() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for call in range(3):  # the first makes the plan
            inputs = [torch.full((1 + rank + 2 * peer,), rank * 10 + peer + call) for peer in range(size)]
            whole = torch.zeros(sum(1 + peer + 2 * rank for peer in range(size)), dtype=torch.int64)
            outputs = list(whole.split([1 + peer + 2 * rank for peer in range(size)]))
            dist.all_to_all(outputs, inputs)
            for peer in range(size):
                assert outputs[peer].tolist() == [peer * 10 + rank + call] * (1 + peer + 2 * rank)
        with pytest.raises(dist.InvalidArgumentError):  # the outputs overlap by an element
            dist.all_to_all([whole[:3], whole[2:9], whole[10:]][:size], inputs)

    run("threads", 3, exchange)


def test_every_plain_call_is_one_of_an_entry() -> None:
    """Each entry runs a plain call itself: the general way is not gone when its plan is known."""

    def count_general_calls() -> None:
        communicator: Any = dist.group.WORLD.communicator
        for method, row in ROWS.items():
            root = 1 if row.root else 0
            case = Case(method, (PLAIN, PLAIN), torch.float32, 3, ReduceOp.SUM, root, "no", "list", "")
            arguments = arguments_of(case)
            getattr(communicator, method)(*arguments)
            queue, seen = communicator.queue, []
            vars(queue)["run"] = lambda *given, seen=seen: seen.append(given)
            try:
                getattr(communicator, method)(*arguments)
            finally:
                del vars(queue)["run"]
            assert not seen, method

    run("threads", 2, count_general_calls)
