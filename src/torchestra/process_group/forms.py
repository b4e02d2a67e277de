"""The form of a group's methods in torch's C++ form: ``group.allreduce(tensors, opts)`` and so on.

:data:`FORMS` holds, for each method, the row of the table of operations that it runs, and torch's names for
its parameters; methods.py makes the methods from it.

Every method is to be called by all ranks of the group, in the same order, and returns a :class:`Work`. It
takes a tensor, or a list of tensors if its description says what that means, and then an options object
(torchestra.arguments.options) or, instead, the arguments of torch's shorter forms: a reduce operation or a
root, and a time-out. Roots are numbers within the group. A method refuses wrong arguments at once with
InvalidArgumentError, in torch's phrases, and the group stays usable; the Work raises all other errors.

Unlike the functions of the package, the methods begin the operation and return (``asyncOp=False`` in the
options makes them wait), and shapes must be equal where torch requires it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Union

import torch

from torchestra.arguments import options
from torchestra.arguments.annotations import is_integer
from torchestra.arguments.options import OperationOptions
from torchestra.communicator import multi_tensor
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine import operations as table
from torchestra.engine.operations import Collective, Shape
from torchestra.errors import InvalidArgumentTypeError, shown
from torchestra.process_group import tensor_lists as lists
from torchestra.tensors import checks
from torchestra.types import ReduceOp, Timeout, timeout_seconds

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]
TensorLists = Union[Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]]]
Outcome = tuple[Union[Work, None], list[Any]]
"""The Work of an operation that has been begun, None if it has ended; and its result."""

_NO_DEFAULT: Any = inspect.Parameter.empty
_NO_SPLITS: Any = (None, None)
_HINTS = {
    "output": "torch.Tensor",
    "input": "torch.Tensor",
    "output_split_sizes": "Sequence[int] | None",
    "input_split_sizes": "Sequence[int] | None",
    "op": "ReduceOp",
    "root": "int",
    "timeout": "Timeout",
}
"""The types of parameters, by name; all others take tensors."""


def options_from(
    kind: type[OperationOptions],
    given: object,
    name: str,
    timeout: Timeout | None = None,
    op: ReduceOp | None = None,
    root: int | None = None,
) -> Any:
    """Return the options of a call, a copy.

    Args:
        kind: their type.
        given: the argument in their place: options of this kind, or of another (only the attributes that
            this kind has are used), a reduce operation, a root, a time-out, or None.
        name: of the method, for messages.
        timeout, op, root: values given by keyword instead, or None.

    Raises:
        InvalidArgumentTypeError: ``given`` is none of these.
    """
    options: Any = kind()
    if given is None:
        pass
    elif given.__class__ is kind:
        vars(options).update(vars(given))
    elif isinstance(given, OperationOptions):
        vars(options).update({key: value for key, value in vars(given).items() if hasattr(options, key)})
    elif isinstance(given, ReduceOp) and hasattr(options, "reduceOp"):
        options.reduceOp = given
    elif is_integer(given) and hasattr(options, "rootRank"):
        options.rootRank = given
    elif isinstance(given, (timedelta, int, float)) and not isinstance(given, bool):
        timeout_seconds(given, name, "opts")
        options.timeout = given
    else:
        raise InvalidArgumentTypeError(
            f"{name}: incompatible function arguments: expected {kind.__name__} as `opts`, got {shown(given)}"
        )
    if op is not None:
        options.reduceOp = op
    if root is not None:
        options.rootRank = root
    if timeout is not None:
        timeout_seconds(timeout, name)
        options.timeout = timeout
    if hasattr(options, "reduceOp"):
        checks.check_op(options.reduceOp, name)
    return options


class Form:
    """Describe the name and the parameters of a method in torch's C++ form.

    Args:
        row: the collective that it runs.
        run: checks a call's arguments and runs it.
        parameters: its parameters in torch's order: those of tensors first, with ``[]`` where they are lists
            of lists; ``?`` if it may be left out. Those after ``*`` are keyword-only.
        details: text for its docstring, after the row's summary.
        coalesced: whether it runs several such operations as one.
    """

    def __init__(
        self,
        row: Collective,
        run: Callable[[Call], Outcome],
        parameters: str,
        details: str = "",
        coalesced: bool = False,
    ) -> None:
        self.row, self.run, self.options = row, run, getattr(options, row.options)
        self.name, self.aliases, self.doc = row.method, row.method_aliases, f"{row.summary}\n\n{details}"
        if coalesced:
            self.name, self.doc = row.coalesced, details
            self.aliases = tuple(f"{alias}_coalesced" for alias in row.aliases)
        words, by_position = parameters.replace("* ", "").split(), parameters.partition("*")[0].split()
        self.parameters = [self._parameter(word, word in by_position) for word in words]
        names = [parameter.name for parameter in self.parameters]
        self._by_position, self._names = names[: len(by_position)], frozenset(names)
        self._required = {each.name for each in self.parameters if each.default is _NO_DEFAULT}
        # For the first two parameters: name, name in torch's short form, default.
        self.first = [(each.name, each.name.removesuffix("s"), each.default) for each in self.parameters[:2]]

    def _parameter(self, word: str, by_position: bool) -> inspect.Parameter:
        name, is_lists, row = word.rstrip("[]?"), "[]" in word, self.row
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if by_position else inspect.Parameter.KEYWORD_ONLY
        hint = _HINTS.get(name, "TensorLists" if is_lists else "Tensors")
        if name == "opts":
            kinds = ["ReduceOp"] * row.reduces + ["int"] * bool(row.root) + ["Timeout"]
            hint = " | ".join([f"options.{row.options}", *kinds])
        default: Any = () if is_lists or name.endswith("sizes") else None
        if not word.endswith("?"):
            default = _NO_DEFAULT
        elif default is None:
            hint += " | None"
        return inspect.Parameter(name, kind, default=default, annotation=hint)

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name; raise Python's own TypeError if they do not fit the method."""
        given = dict(zip(self._by_position, args, strict=False))
        if not kwargs and len(self._required) <= len(args) == len(given):
            return given  # parameters without a default come first
        given.update(kwargs)
        if len(given) != len(args) + len(kwargs) or not self._required <= given.keys() <= self._names:
            inspect.Signature(self.parameters).bind(*args, **kwargs)
        return given

    def method(self) -> Callable[..., Work]:
        """Make the method."""

        def method(self: Any, *args: Any, **kwargs: Any) -> Work:
            work, result = form.run(Call(form, self.communicator, form.given(args, kwargs)))
            return work or Work.finished(form.name, result)

        form = self
        signature = inspect.signature(method)
        made: Any = method
        made.__name__, made.__qualname__ = self.name, f"CollectiveMethods.{self.name}"
        made.__doc__ = self.doc.strip()
        made.__signature__ = signature.replace(
            parameters=[signature.parameters["self"].replace(annotation=_NO_DEFAULT), *self.parameters]
        )
        made.__annotations__ = {each.name: each.annotation for each in self.parameters} | {"return": "Work"}
        return method


class Call:
    """A call of a method.

    Attributes:
        row, name: the collective, and the method's name.
        options: the call's own copy.
        communicator: the communicator that runs it.
    """

    def __init__(self, form: Form, communicator: Communicator, given: dict[str, Any]) -> None:
        self.row, self.name, self.communicator = form.row, form.name, communicator
        self._first, self._given = form.first, given
        get = given.get
        self.options = options_from(
            form.options, get("opts"), form.name, get("timeout"), get("op"), get("root")
        )
        # Whether only to begin the operation, and its time-out.
        self.limits: tuple[bool, float | None] = (self.options.asyncOp, self.options.seconds(form.name))

    def value(self, position: int) -> tuple[Any, str, str]:
        """Return the argument for the parameter at a position, the parameter's name, and the method's.

        Torch's short name, ``tensor`` for ``tensors``, is accepted as well.
        """
        name, short, default = self._first[position]
        if (value := self._given.get(short)) is not None:
            return value, short, self.name
        return self._given.get(name, default), name, self.name

    def tensors(self, position: int) -> list[torch.Tensor]:
        """Return the tensors at a position; a single tensor becomes a list."""
        return lists.as_list(*self.value(position))

    def lists(self, position: int) -> list[list[torch.Tensor]]:
        """Return the lists of tensors at a position."""
        return lists.as_lists(*self.value(position))

    def root(self) -> int:
        return lists.check_root(self.options.rootRank, self.communicator.size, self.name)

    def run(self, output: Any = None, input: Any = None, root: int | None = None) -> Work | None:  # noqa: A002
        """Run the collective; by the communicator's method of that name, if any, which may be faster."""
        row, options = self.row, self.options
        op = options.reduceOp if row.reduces else None
        splits = _NO_SPLITS
        if row.splits:
            expected, sent = map(self._given.get, ("output_split_sizes", "input_split_sizes"))
            splits = lists.splits_or_none(expected), lists.splits_or_none(sent)
        own = getattr(self.communicator, row.name, None)
        if own is None:
            return self.communicator.collective(row, output, input, op, root, splits, *self.limits)
        given = [] if row.output is None else [output] if row.in_place else [output, input]
        given += [value for value in (op, root) if value is not None]
        return own(*given, *splits, *self.limits) if row.splits else own(*given, *self.limits)  # type: ignore[no-any-return]


def in_place(call: Call) -> Outcome:
    """Run a collective that replaces the tensors of a list: one per rank, or several that are alike."""
    row, name, communicator = call.row, call.name, call.communicator
    tensors, root, number = call.tensors(0), None, 0
    if row.root:
        root = call.root()
        number = lists.check_root_tensor(call.options.rootTensor, tensors, name)
    if not row.multi_tensor:
        lists.check_single(tensors, "tensor list", name)
    lists.check_some(tensors, name)
    if not row.sparse:
        lists.check_dense(tensors, name)
    if len(tensors) == 1:
        return call.run(tensors[0], tensors[0], root), tensors
    lists.check_alike(tensors, tensors[number], name)
    if root is not None:
        return multi_tensor.broadcast_together(communicator, tensors, root, number, *call.limits), tensors
    op = call.options.reduceOp
    return multi_tensor.all_reduce_together(communicator, tensors, op, *call.limits), tensors


def _all_reduce_coalesced(call: Call) -> Outcome:
    tensors = lists.several(*call.value(0))
    lists.check_some(tensors, call.name)
    lists.check_same_dtypes(tensors, call.name)
    op = call.options.reduceOp
    return multi_tensor.all_reduce_coalesced(call.communicator, tensors, op, *call.limits), tensors


def _single(call: Call) -> Outcome:
    """Run a collective that takes an output and an input."""
    output = checks.check_is_tensor(*call.value(0))
    input = checks.check_is_tensor(*call.value(1))  # noqa: A001
    if call.row.splits:
        lists.check_dense([output, input], call.name)
        lists.check_same_type(output, input, call.name)
    else:
        _check_whole(call, output, input)
    return call.run(output, input), [output]


def _check_whole(call: Call, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    whole, piece = (output, input) if call.row.shape is Shape.OUTPUT_IS_WHOLE else (input, output)
    lists.check_pieces(whole, piece, call.communicator.size, call.name)


def _pairs(call: Call) -> Outcome:
    """Run a collective on each pair of an output and an input, as one operation."""
    outputs, inputs = call.tensors(0), call.tensors(1)
    lists.check_pairs(outputs, inputs, call.name)
    for output, tensor in zip(outputs, inputs, strict=True):
        _check_whole(call, output, tensor)
    op = getattr(call.options, "reduceOp", None)
    return multi_tensor.coalesced(call.communicator, call.row, outputs, inputs, op, *call.limits), outputs


def _all_gather(call: Call) -> Outcome:
    tensors, outputs = call.tensors(1), call.lists(0)
    lists.check_gather_lists(outputs, tensors, call.communicator.size, call.name)
    if len(tensors) == 1:
        return call.run(outputs[0], tensors[0]), outputs[0]
    return multi_tensor.all_gather_together(call.communicator, outputs, tensors, *call.limits), outputs


def _all_gather_coalesced(call: Call) -> Outcome:
    tensors, outputs = lists.several(*call.value(1)), call.lists(0)
    lists.check_coalesced_lists(outputs, tensors, call.communicator.size, call.name)
    return multi_tensor.all_gather_coalesced(call.communicator, outputs, tensors, *call.limits), outputs


def _rooted(call: Call) -> Outcome:
    """Run a collective that takes a tensor on every rank and a list on the root."""
    gathers, name, communicator = call.row.root == "dst", call.name, call.communicator
    if gathers:
        ones, several = call.tensors(1), call.lists(0)
    else:
        ones, several = call.tensors(0), call.lists(1)
    root = call.root()
    one, of_root = ("input", "output") if gathers else ("output", "input")
    lists.check_single(ones, f"{one} tensor list", name)
    lists.check_dense(ones, name)
    is_root = communicator.rank == root
    listed = lists.check_rooted(several, ones[0], is_root, communicator.size, of_root, name)
    if gathers:
        return call.run(listed, ones[0], root), listed or []
    return call.run(ones[0], listed, root), ones


def _reduce_scatter(call: Call) -> Outcome:
    outputs, inputs = call.tensors(0), call.lists(1)
    lists.check_reduce_scatter_lists(outputs, inputs, call.communicator.size, call.name)
    return call.run(outputs[0], inputs[0]), outputs


def _all_to_all(call: Call) -> Outcome:
    outputs, inputs = call.tensors(0), call.tensors(1)
    lists.check_exchange(outputs, inputs, call.communicator.size, call.name)
    return call.run(outputs, inputs), outputs


def _barrier(call: Call) -> Outcome:
    return call.run(), []


FORMS = (
    Form(
        table.ALL_REDUCE,
        in_place,
        "tensors? opts? timeout? * op? tensor?",
        """Of a list, whose tensors have one dtype and shape, all tensors of all ranks are reduced
together, and each becomes the result. The result of the Work is the list.""",
    ),
    Form(
        table.ALL_REDUCE_LIST,
        _all_reduce_coalesced,
        "tensors opts?",
    ),
    Form(
        table.REDUCE,
        in_place,
        "tensors? opts? op? timeout? * root? tensor?",
        "A list must have one tensor.",
    ),
    Form(
        table.BROADCAST,
        in_place,
        "tensors? opts? timeout? * root? tensor?",
        """Of a list, whose tensors have one dtype and shape, the root's tensor number ``rootTensor``
becomes the value of all tensors on all ranks.""",
    ),
    Form(
        table.ALL_GATHER,
        _all_gather,
        "output_tensors[] input_tensors? opts? * input_tensor? timeout?",
        """It is ``allgather([[out0, out1]], [tensor])``. Of n input tensors on each rank, alike in dtype and
shape, each of n lists of outputs receives all: those of rank 0 in their order, then those of rank 1, and so
on. The short form is ``allgather([out0, out1], tensor)``. The result of the Work is the list of outputs, of
several inputs the list of lists.""",
    ),
    Form(
        table.ALL_GATHER,
        _all_gather_coalesced,
        "output_lists[] input_list opts?",
        "Put input i of rank p into ``output_lists[p][i]`` on every rank; inputs may differ in dtype.",
        coalesced=True,
    ),
    Form(table.ALL_GATHER_INTO_TENSOR, _single, "output input opts?"),
    Form(
        table.ALL_GATHER_INTO_TENSOR,
        _pairs,
        "output_lists input_list opts?",
        ":meth:`allgather_into_tensor` of each pair of the two lists, as one operation.",
        coalesced=True,
    ),
    Form(
        table.GATHER,
        _rooted,
        "output_tensors[] input_tensors? opts? timeout? * root? input_tensor?",
        """It is ``gather([[out0, out1]], [tensor], opts)``; on the other ranks ``output_tensors`` is
empty. The short form: ``gather([out0, out1], t, root)``. The result of the Work is the list of outputs, empty
elsewhere.""",
    ),
    Form(
        table.SCATTER,
        _rooted,
        "output_tensors? input_tensors[]? opts? timeout? * root? output_tensor?",
        """It is ``scatter([output], [[in0, in1]], opts)``; on the other ranks ``input_tensors`` is empty. The
short form: ``scatter(output, [in0, in1], root)``.""",
    ),
    Form(
        table.REDUCE_SCATTER,
        _reduce_scatter,
        "output_tensors? input_tensors[]? opts? timeout? * op? input_tensor?",
        """It is ``reduce_scatter([output], [[for0, for1]], opts)``, or
``reduce_scatter(output, [for0, for1], op)``.""",
    ),
    Form(table.REDUCE_SCATTER_TENSOR, _single, "output input opts?"),
    Form(
        table.REDUCE_SCATTER_TENSOR,
        _pairs,
        "output_tensors input_tensors opts?",
        ":meth:`reduce_scatter_tensor` of each pair of the two lists, as one operation.",
        coalesced=True,
    ),
    Form(
        table.ALL_TO_ALL,
        _all_to_all,
        "output_tensors? input_tensors? opts? * output_tensor? input_tensor? timeout?",
    ),
    Form(
        table.ALL_TO_ALL_SINGLE,
        _single,
        "output input output_split_sizes? input_split_sizes? opts? * timeout?",
        "Split sizes count rows for each rank; empty ones stand for equal ranges.",
    ),
    Form(table.SCAN, in_place, "tensors opts? timeout? * op?"),
    Form(table.EXSCAN, in_place, "tensors opts? timeout? * op?"),
    Form(table.BARRIER, _barrier, "opts? * timeout?"),
)
"""The methods of every group."""
