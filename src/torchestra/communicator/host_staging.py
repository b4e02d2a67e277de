"""Tensors of a GPU: operations run on buffers in pinned memory, which are copied on a separate stream.

An operation that is called with CUDA tensors is collected with buffers in their place. When its turn comes,
the tensors are copied to the buffers, and afterwards those that it has filled are copied back:

* when it is called, an event is recorded on the caller's stream of every device concerned;
* the copies run on another stream of that device, which waits for the event; so work that the program
  launches afterwards does not delay them, nor they that work;
* the host waits for the copies before it goes on. So when the operation is done its results can be used on
  any stream, and the tensors' memory can be freed.

While the host waits, signals are handled. If torch was built without CUDA no such tensor can exist; then the
functions of this file return their arguments unchanged, and cost nothing.
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
from torchestra.tensors.contiguity import contiguity_problem

POSSIBLE = torch.backends.cuda.is_built()
"""Whether there can be CUDA tensors at all."""

# The parameters that an operation only writes; they need not be copied from the device.
_ONLY_WRITTEN = ("output", "outputs")
_SPINS = 50
_POLL_SECONDS = 50e-6

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Copies(Protocol):
    """Copy the elements of one operation from devices and back."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the first of each pair, which is on a device, to the second; return when done."""

    def give_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the second of each pair to the first; return when done."""


class CudaCopies:
    """Copy on a side stream of each device, after the work that the calling stream had when this was made."""

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
                    time.sleep(_POLL_SECONDS)

    @classmethod
    def _stream(cls, device: torch.device) -> torch.cuda.Stream:
        if device not in cls._streams:
            cls._streams[device] = torch.cuda.Stream(device)
        return cls._streams[device]


class StagingBuffers:
    """The buffers of some device tensors.

    Attributes:
        buffers: by the identity of each one's tensor.
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
        """Replace tensors, also in lists (of lists …), by their buffers; return anything else as it is."""
        return _replaced(value, self.buffers)

    def in_tensors(self, value: Any) -> Any:
        """Do the inverse of :meth:`in_buffers`."""
        return _replaced(value, self._origins)


def _once(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _core(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor without the repetitions of expanded dimensions."""
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
    """Yield the tensors in a list of lists of anything."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether this is a dense tensor of a GPU, with memory there."""
    return tensor.is_cuda and tensor.layout is torch.strided and not contiguity_problem(tensor)


def staged(method: _Method) -> _Method:
    """Make a collective accept tensors of GPUs as well.

    Its first argument must be the communicator; it must have a parameter ``async_op``.
    """
    if not POSSIBLE:
        return method
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def call(communicator: Any, *args: Any, **kwargs: Any) -> Work | None:
        if not any(map(is_on_gpu, tensors_in([*args, *kwargs.values()]))):
            return cast("Work | None", method(communicator, *args, **kwargs))
        bound = parameters.bind(communicator, *args, **kwargs)
        return run_staged(method, bound, is_on_gpu, StagingBuffers)

    return cast(_Method, call)


def run_staged(
    method: Callable[..., Any],
    bound: inspect.BoundArguments,
    is_staged: Callable[[torch.Tensor], bool],
    stage_of: Callable[[Sequence[torch.Tensor]], StagingBuffers],
) -> Work | None:
    """Call a collective with buffers in place of the tensors for which ``is_staged`` is true."""
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
    """Return the tensor to send: the given one, or for one of a GPU its filled buffer."""
    if not POSSIBLE or not isinstance(tensor, torch.Tensor) or not is_on_gpu(tensor):
        return tensor
    stage = StagingBuffers([tensor])
    stage.fetch([tensor])
    return stage.buffers[id(tensor)]


def receive_buffer(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return the tensor to receive into (for one of a GPU a buffer), and a function to call afterwards."""
    if not POSSIBLE or not isinstance(tensor, torch.Tensor) or not is_on_gpu(tensor):
        return tensor, _nothing
    stage = StagingBuffers([tensor])
    return stage.buffers[id(tensor)], functools.partial(stage.give_back, [tensor])


def on_cpu(tensors: object) -> object:
    """Replace tensors of GPUs in a list of sparse tensors by copies; return anything else as it is."""
    if not POSSIBLE or not isinstance(tensors, (list, tuple)):
        return tensors
    return [
        each.detach().cpu() if isinstance(each, torch.Tensor) and each.is_cuda else each for each in tensors
    ]


def _nothing() -> None:
    pass
