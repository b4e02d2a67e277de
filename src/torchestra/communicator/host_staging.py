"""Tensors of a GPU: operations run on buffers of them in pinned memory, copied on a stream of their own.

An operation that is called with CUDA tensors is collected with the buffers in their place. When its turn
comes it is preceded by copies from the tensors and followed by copies back to those that it has filled:

* when it is called, an event is recorded on the caller's stream of every device concerned;
* the copies run on another stream of that device, which waits for the event; so nothing that the program
  launches afterwards delays them, and they delay nothing that it launches;
* the host waits for the copies before it goes on. So when the operation is done its results can be used on
  any stream, and the tensors' memory can be freed.

While the host waits, signals are handled. Where torch was built without CUDA no such tensor can exist; then
the functions of this file hand back what they are given, and cost nothing.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch

from torchestra.communicator.queue import OperationQueue, count_operations
from torchestra.communicator.work import Work
from torchestra.tensors.contiguity import what_is_missing

POSSIBLE = torch.backends.cuda.is_built()
"""Whether there can be CUDA tensors at all."""

# What an operation only writes need not be send_buffer from the device.
_ONLY_WRITTEN = ("output", "outputs")
_SPINS = 50
_NAP_SECONDS = 50e-6

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Copies(Protocol):
    """Copy the elements of one operation from devices and back."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the first of each pair, which is on a device, to the second; return when that is done."""

    def give_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the second of each pair to the first; return when that is done."""


class CudaCopies:
    """Copies on a side stream of each device, after what the calling stream had to do when this was made."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._reached = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors}
        }

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copy([(buffer, tensor, tensor.device) for tensor, buffer in pairs])

    def give_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copy([(tensor, buffer, tensor.device) for tensor, buffer in pairs])

    def _copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, torch.device]]) -> None:
        for target, source, device in copies:
            stream = self._stream(device)
            stream.wait_event(self._reached[device])
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for done in [self._stream(device).record_event() for device in {device for _, _, device in copies}]:
            for spin in range(1 << 62):
                if done.query():
                    break
                if spin > _SPINS:
                    time.sleep(_NAP_SECONDS)

    @classmethod
    def _stream(cls, device: torch.device) -> torch.cuda.Stream:
        if device not in cls._streams:
            cls._streams[device] = torch.cuda.Stream(device)
        return cls._streams[device]


class Stage:
    """The buffers of some device tensors.

    Attributes:
        buffers: by the identity of the tensor that each is of.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], copies: Copies | None = None, *, pinned: bool = True
    ) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._copies = CudaCopies(tensors) if copies is None else copies
        self._stored = {key: _blank(_core(tensor), pinned) for key, tensor in self._tensors.items()}
        self.buffers = {key: self._stored[key].expand(tensor.shape) for key, tensor in self._tensors.items()}
        self._origins = {id(buffer): self._tensors[key] for key, buffer in self.buffers.items()}

    def fetch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill the buffers of these tensors."""
        self._copies.fetch([(_core(tensor), self._stored[id(tensor)]) for tensor in _once(tensors)])

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill these tensors from their buffers."""
        self._copies.give_back([(_core(tensor), self._stored[id(tensor)]) for tensor in _once(tensors)])

    def in_buffers(self, value: Any) -> Any:
        """A tensor, or lists (of lists …) of them and anything else, with buffers in the tensors' places."""
        return _replaced(value, self.buffers)

    def in_tensors(self, value: Any) -> Any:
        """The inverse of :meth:`in_buffers`."""
        return _replaced(value, self._origins)


def _once(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _core(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor whose elements are stored apart: one of each that an expansion repeats."""
    core = tensor.detach()
    for dimension, (stride, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and length > 1:
            core = core.narrow(dimension, 0, 1)
    return core


def _blank(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [_replaced(each, by) for each in value]
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a list of lists of anything."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether this is a dense tensor of a GPU, with memory there."""
    return tensor.is_cuda and tensor.layout is torch.strided and not what_is_missing(tensor)


def staged(method: _Method) -> _Method:
    """A collective of a communicator, or a function of one, that takes tensors of GPUs as well.

    Its first argument is the communicator; it has a parameter ``async_op``.
    """
    if not POSSIBLE:
        return method
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def call(communicator: Any, *args: Any, **kwargs: Any) -> Work | None:
        if not any(map(is_on_gpu, tensors_in([*args, *kwargs.values()]))):
            return cast("Work | None", method(communicator, *args, **kwargs))
        bound = parameters.bind(communicator, *args, **kwargs)
        return run_staged(method, bound, is_on_gpu, Stage)

    return cast(_Method, call)


def run_staged(
    method: Callable[..., Any],
    bound: inspect.BoundArguments,
    is_staged: Callable[[torch.Tensor], bool],
    stage_of: Callable[[Sequence[torch.Tensor]], Stage],
) -> Work | None:
    """Call a collective with buffers in the places of those tensors of which ``is_staged`` holds."""
    communicator = bound.args[0]
    values = dict(list(bound.arguments.items())[1:])
    tensors = [tensor for tensor in tensors_in(list(values.values())) if is_staged(tensor)]
    read = [
        tensor
        for parameter, value in values.items()
        if parameter not in _ONLY_WRITTEN
        for tensor in tensors_in(value)
        if is_staged(tensor)
    ]
    name = values["row"].name if "row" in values else method.__name__
    with communicator.queue.abort_on_error(f"{name} of tensors of a GPU"):
        stage = stage_of(tensors)
    async_op = bool(values.pop("async_op", False))
    with communicator.queue.coalescing() as steps:
        method(communicator, **{name: stage.in_buffers(value) for name, value in values.items()})

    def operation(site: str | None) -> list[Any]:
        stage.fetch(read)
        results: list[Any] = []
        for step in steps:
            results = stage.in_tensors(step.operation(site))
        stage.give_back([tensor for tensor in tensors_in(results) if is_staged(tensor)])
        return results

    queue: OperationQueue = communicator.queue
    return queue.run(operation, steps[-1].description, async_op, count_operations(steps), read)


def send_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the filled buffer of one of a GPU: what is to be sent."""
    if not POSSIBLE or not isinstance(tensor, torch.Tensor) or not is_on_gpu(tensor):
        return tensor
    stage = Stage([tensor])
    stage.fetch([tensor])
    return stage.buffers[id(tensor)]


def receive_buffer(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """The tensor, or the buffer of one of a GPU, to receive into, and what is to be called afterwards."""
    if not POSSIBLE or not isinstance(tensor, torch.Tensor) or not is_on_gpu(tensor):
        return tensor, _nothing
    stage = Stage([tensor])
    return stage.buffers[id(tensor)], functools.partial(stage.give_back, [tensor])


def on_cpu(tensors: object) -> object:
    """A list of sparse tensors with copies in the places of those of GPUs; what is no list stays as it is."""
    if not POSSIBLE or not isinstance(tensors, (list, tuple)):
        return tensors
    return [
        each.detach().cpu() if isinstance(each, torch.Tensor) and each.is_cuda else each for each in tensors
    ]


def _nothing() -> None:
    pass
