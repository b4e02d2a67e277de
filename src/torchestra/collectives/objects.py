"""Collectives and messages of Python objects, with torch.distributed's names, arguments and defaults.

Objects are pickled (tensors/serialization.py): use these only among ranks that trust each other. Each is to
be called by every rank of the group, in the same order, except send_object_list and recv_object_list, which
are for the two ranks that they are between. They block until they are done. A small object takes one
operation on tensors; larger ones take one more, and one for each large tensor or array (about 32 KiB) within.

Raised by all of them: InvalidArgumentError (wrong arguments; nothing was sent) and the errors of operations
on tensors. In a collective, a rank whose object cannot be pickled raises an UnpicklableObjectError, and all
others raise an ObjectTransferError that names it. An object that cannot be unpickled where it arrives
raises an ObjectTransferError there, and only there. The group stays usable in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Union

import torch

from torchestra.arguments.annotations import checked
from torchestra.collectives.group_arguments import member_of, root_of, sender_of
from torchestra.engine.operations import ALL_GATHER, ALL_TO_ALL, SCATTER
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, ObjectTransferError
from torchestra.process_group import ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.tensors.packed_objects import BLOCK_BYTES, PackedObjects, Unreadable
from torchestra.world.init import AnyGroup, default_group

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

Device = Union[torch.device, str, int]


@checked
def all_gather_object(object_list: list[Any], obj: Any, group: AnyGroup | None = None) -> None:
    """Put the object of rank p of the group into ``object_list[p]`` on every rank, a copy on its own too."""
    name = "all_gather_object"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return
    _check_length(object_list, "object_list", member.size(), name)
    all_packed = _collect(member, obj, None, name)
    _unpack_each(all_packed, object_list, member, name)


@checked
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: AnyGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Put the object of rank p into ``object_gather_list[p]`` on rank ``dst`` (default: the group's rank 0).

    On the other ranks ``object_gather_list`` must be None.
    """
    name = "gather_object"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return
    root = root_of(member, dst, group_dst, "dst", name, default=0)
    if member.rank() != root:
        if object_gather_list:
            raise InvalidArgumentError(
                f"{name}: Argument ``object_gather_list`` must NOT be specified on non-destination ranks."
            )
    elif object_gather_list is None:
        raise InvalidArgumentError(
            f"{name}: Argument ``object_gather_list`` must be specified on destination rank."
        )
    else:
        _check_length(object_gather_list, "object_gather_list", member.size(), name)
    all_packed = _collect(member, obj, root, name)
    if object_gather_list is not None and member.rank() == root:
        _unpack_each(all_packed, object_gather_list, member, name)


@checked
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup | None = None,
    device: Device | None = None,
    group_src: int | None = None,
) -> None:
    """Replace the objects in ``object_list`` by those of rank ``src`` (default: the group's rank 0).

    All lists must have the same length; the list of ``src`` does not change. ``device`` has no effect:
    objects go through memory of the host, and tensors in them keep their device.
    """
    name = "broadcast_object_list"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return
    _check_list(object_list, "object_list", name)
    _check_device(device, name)
    root = root_of(member, src, group_src, "src", name, default=0)
    communicator, is_source = member.communicator, member.rank() == root
    own, error = _packed(object_list, name) if is_source else (None, None)
    with communicator.queue.abort_on_error(name):
        block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8) if own is None else own.block()
        communicator.broadcast(block, root)
        packed = PackedObjects.arriving(block)[0] if own is None else own
        error = _failure({root: packed}, error, member, name)
        if error is None:
            if packed.has_rest:
                communicator.broadcast(packed.rest, root)
            for buffer in packed.buffers if is_source else packed.expect_buffers():
                communicator.broadcast(buffer, root)
    if error is not None:
        raise error
    if not is_source:
        _unpack_list(packed, object_list, root, member, name)


@checked
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: AnyGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Put ``scatter_object_input_list[p]`` of rank ``src`` into ``scatter_object_output_list[0]`` of rank p.

    ``src`` is by default the group's rank 0; the other ranks' input lists are ignored.
    """
    name = "scatter_object_list"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise InvalidArgumentError(
            f"{name}: Expected argument scatter_object_output_list to be a list of size at least 1."
        )
    root = root_of(member, src, group_src, "src", name, default=0)
    communicator, size = member.communicator, member.size()
    outgoing: list[PackedObjects] | None = None
    error: Exception | None = None
    if member.rank() == root:
        if scatter_object_input_list is None:
            raise InvalidArgumentError(f"{name}: source rank must provide non-None scatter_object_input_list")
        if len(scatter_object_input_list) != size:
            raise InvalidArgumentError(
                f"{name}: scatter_object_input_list must have one object for each of the group's {size}"
                f" ranks, got {len(scatter_object_input_list)}"
            )
        outgoing, error = _packed_for_each(scatter_object_input_list, name)

    def move(piece: Callable[[PackedObjects], torch.Tensor]) -> None:
        sources = [_NOTHING] * size if outgoing is None else [piece(each) for each in outgoing]
        targets = [piece(packed) if peer == root else _NOTHING for peer in range(size)]
        communicator.collective(ALL_TO_ALL, targets, sources)

    with communicator.queue.abort_on_error(name):
        block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        communicator.collective(SCATTER, block, None if outgoing is None else _blocks(outgoing), root=root)
        packed, head = PackedObjects.arriving(block)
        error = _failure({root: packed}, error, member, name)
        if error is None:
            if head.more & 1:
                move(_rest)
            packed.expect_buffers()
            for index in range(head.more >> 1):
                move(partial(_buffer, index))
    if error is not None:
        raise error
    if packed:
        (scatter_object_output_list[0],) = _unpacked(packed, root, member, name)


@checked
def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: AnyGroup | None = None,
    device: Device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to rank ``dst``, which must call :func:`recv_object_list`.

    To be called by the sender only. ``device`` and ``use_batch`` have no effect. If an object cannot be
    pickled, nothing is sent.
    The objects go as messages with tag 0, and keep their order among those.
    """
    name = "send_object_list"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return
    if not isinstance(object_list, (list, tuple)):
        raise InvalidArgumentTypeError(f"{name}: `object_list` must be a list, got {object_list!r}")
    _check_device(device, name)
    rank = root_of(member, dst, group_dst, "dst", name)
    _check_not_self(member, rank, "destination", name)
    packed = PackedObjects.of(object_list, name)
    send = member.communicator.send
    send(packed.block(), rank)
    with member.communicator.queue.abort_on_error(name):
        if packed.has_rest:
            send(packed.rest, rank)
        for buffer in packed.buffers:
            send(buffer, rank)


@checked
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup | None = None,
    device: Device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects from rank ``src`` (default: from any) into ``object_list``, which must be as long.

    To be called by the receiver only. ``device`` and ``use_batch`` have no effect.

    Returns:
        The global rank that sent; -1 on a rank that is not in the group.
    """
    name = "recv_object_list"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return -1
    _check_list(object_list, "object_list", name)
    _check_device(device, name)
    source = sender_of(member, src, group_src, name)
    if source is not None:
        _check_not_self(member, source, "source", name)
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    receive = member.communicator.recv
    source = receive(block, source)
    with member.communicator.queue.abort_on_error(name):
        packed, _ = PackedObjects.arriving(block)
        if packed.has_rest:
            receive(packed.rest, source)
        for buffer in packed.expect_buffers():
            receive(buffer, source)
    _unpack_list(packed, object_list, source, member, name)
    return member.to_global_rank(source)


# -- transfer of packed objects

_NOTHING = torch.empty(0, dtype=torch.uint8)


def _collect(member: ProcessGroup, obj: object, root: int | None, name: str) -> list[PackedObjects]:
    """Return the objects of all ranks, on the root or (None) on every rank; an empty list on the others."""
    communicator, size, rank = member.communicator, member.size(), member.rank()
    own, error = _packed([obj], name)
    receives = root is None or root == rank

    def move(piece: Callable[[PackedObjects], torch.Tensor]) -> None:
        targets = [piece(packed) if receives else _NOTHING for packed in all_packed]
        if root is None:
            communicator.collective(ALL_GATHER, targets, piece(own))
        else:
            sources = [piece(own) if peer == root else _NOTHING for peer in range(size)]
            communicator.collective(ALL_TO_ALL, targets, sources)

    with communicator.queue.abort_on_error(name):
        blocks = torch.empty((size, BLOCK_BYTES), dtype=torch.uint8)
        communicator.all_gather_into_tensor(blocks, own.block())
        arrived = PackedObjects.all_arriving(blocks)
        all_packed = [packed for packed, _ in arrived]
        error = _failure(dict(enumerate(all_packed)), error, member, name)
        if error is None:
            if any(packed.has_rest for packed in all_packed):
                move(_rest)
            if receives:
                for packed in all_packed:
                    packed.expect_buffers()
            for index in range(max(head.buffers for _, head in arrived)):
                move(partial(_buffer, index))
    if error is not None:
        raise error
    return all_packed if receives else []


def _rest(packed: PackedObjects) -> torch.Tensor:
    return packed.rest


def _buffer(index: int, packed: PackedObjects) -> torch.Tensor:
    return packed.buffers[index] if index < len(packed.buffers) else _NOTHING


def _blocks(all_packed: list[PackedObjects]) -> list[torch.Tensor]:
    more = int(any(packed.has_rest for packed in all_packed))
    more += 2 * max(len(packed.buffers) for packed in all_packed)
    return [packed.block(more) for packed in all_packed]


def _packed(objects: Sequence[object], name: str) -> tuple[PackedObjects, Exception | None]:
    """Pack objects, or the reason why that fails: the other ranks wait for a message in any case."""
    try:
        return PackedObjects.of(objects, name), None
    except Exception as error:
        return PackedObjects.failure(error.__cause__ or error), error


def _packed_for_each(objects: Sequence[object], name: str) -> tuple[list[PackedObjects], Exception | None]:
    all_packed = []
    for item in objects:
        packed, error = _packed([item], name)
        if error is not None:
            return [packed] * len(objects), error
        all_packed.append(packed)
    return all_packed, None


def _failure(
    all_packed: dict[int, PackedObjects], own: Exception | None, member: ProcessGroup, name: str
) -> Exception | None:
    """Return the error for all ranks if any could not pack its objects; this rank's own reason first."""
    failures = {rank: packed.reason for rank, packed in all_packed.items() if packed.failed}
    if own is not None or not failures:
        return own
    reasons = "; ".join(f"that of rank {rank}: {reason}" for rank, reason in failures.items())
    return ObjectTransferError(
        f"{name} of group {member.group_name!r}: an object could not be pickled,"
        f" {reasons}. No object was moved; the group stays usable.",
        tuple(failures),
    )


def _unpacked(packed: PackedObjects, sender: int, member: ProcessGroup, name: str) -> list[object]:
    found = packed.objects()
    for index, item in enumerate(found):
        if isinstance(item, Unreadable):
            which = f" {index} of {len(found)}" if len(found) > 1 else ""
            raise ObjectTransferError(
                f"{name} of group {member.group_name!r}: object{which} from rank {sender} cannot be unpickled"
                f" on rank {member.rank()}: {type(item.error).__name__}: {item.error}",
                (sender,),
            ) from item.error
    return found


def _unpack_each(
    all_packed: list[PackedObjects], object_list: list[Any], member: ProcessGroup, name: str
) -> None:
    """Put each rank's object into its place; put all readable ones before raising an error."""
    error: ObjectTransferError | None = None
    for rank, packed in enumerate(all_packed):
        try:
            (object_list[rank],) = _unpacked(packed, rank, member, name)
        except ObjectTransferError as unreadable:
            error = error or unreadable
    if error is not None:
        raise error


def _unpack_list(
    packed: PackedObjects, object_list: list[Any], sender: int, member: ProcessGroup, name: str
) -> None:
    if not packed:
        return
    found = _unpacked(packed, sender, member, name)
    if len(found) != len(object_list):
        raise InvalidArgumentError(
            f"{name}: object_list has {len(object_list)} places on rank {member.rank()}, but rank {sender}"
            f" sent {len(found)} objects; they are lost"
        )
    object_list[:] = found


# -- checks


def _check_list(object_list: object, parameter: str, name: str) -> None:
    if not isinstance(object_list, list):
        raise InvalidArgumentTypeError(f"{name}: `{parameter}` must be a list, got {object_list!r}")


def _check_length(object_list: object, parameter: str, size: int, name: str) -> None:
    _check_list(object_list, parameter, name)
    assert isinstance(object_list, list)
    if len(object_list) < size:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` must have a place for each of the group's {size} ranks,"
            f" got {len(object_list)}"
        )


def _check_not_self(member: ProcessGroup, rank: int, role: str, name: str) -> None:
    if rank == member.rank():
        raise InvalidArgumentError(
            f"{name}: Invalid {role} rank: {role} rank should not be the same as the rank of the current"
            " process."
        )


def _check_device(device: object, name: str) -> None:
    """Refuse a device that does not exist here."""
    if device is None:
        return
    try:
        chosen = device if isinstance(device, torch.device) else torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentTypeError(f"{name}: `device` must be a torch.device, got {device!r}") from error
    if chosen.type == "cpu":
        return
    module: Any = getattr(torch, chosen.type, None)
    count = module.device_count() if hasattr(module, "device_count") else 0
    if (chosen.index or 0) >= count:
        raise InvalidArgumentError(f"{name}: `device` is {chosen}, but there is no such device here")


for _name in __all__:
    untraced(globals()[_name])
