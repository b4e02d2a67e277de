"""As ``torch.distributed.collective_utils``: all ranks receive objects, or all raise an exception."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Union, cast

from torchestra.collectives.objects import all_gather_object, broadcast_object_list
from torchestra.errors import InvalidArgumentTypeError
from torchestra.process_group import ProcessGroup

__all__ = ["SyncPayload", "all_gather", "all_gather_object_enforce_type", "broadcast"]

T = TypeVar("T")


@dataclass
class SyncPayload(Generic[T]):
    """The outcome of a rank: a value, or an exception.

    Attributes:
        stage_name: the stage of the program.
        success: whether it has a value.
        payload: the value.
        exception: why there is none.
    """

    stage_name: str | None
    success: bool
    payload: T
    exception: Exception | None = None


def broadcast(
    data_or_fn: Union[T, Callable[[], T]],
    *,
    success: bool = True,
    stage_name: str | None = None,
    rank: int = 0,
    pg: ProcessGroup | None = None,
) -> T:
    """Return, on all ranks of a group, the value of rank ``rank``, or of a function called there.

    Args:
        data_or_fn: the value, or the function; None with ``success`` False.
        success: if False, all ranks raise.
        stage_name: the stage of the program, for the message.
        rank: the rank whose value is sent.
        pg: the group; None: this rank alone.

    Raises:
        RuntimeError: on all ranks, if that rank's function raised, or its ``success`` is False.
    """
    if not success and data_or_fn is not None:
        raise AssertionError("Data or Function is expected to be None if not successful")
    mine: SyncPayload[Any] = SyncPayload(stage_name, success, None)
    if rank == (0 if pg is None else pg.rank()):
        mine = _payload(data_or_fn, stage_name, success)
    told = [mine]
    if pg is not None:
        broadcast_object_list(told, src=rank, group=pg)
    if not told[0].success:
        stage = "" if stage_name is None else f": stage {told[0].stage_name}"
        reason = "" if told[0].exception is None else f": exception {told[0].exception}"
        raise RuntimeError(f"Rank {rank} failed{stage}{reason}") from told[0].exception
    return cast(T, told[0].payload)


def all_gather(
    data_or_fn: Union[T, Callable[[], T]], stage_name: str | None = None, pg: ProcessGroup | None = None
) -> list[T]:
    """Return each rank's value, or the result of its function, in the order of the group's ranks.

    Args:
        data_or_fn: the value, or the function.
        stage_name: the stage of the program; a rank at another stage is left out.
        pg: the group; None: this rank alone.

    Raises:
        RuntimeError: on all ranks, if the function of any rank raised. Its arguments are a text and a list
            of ranks and exceptions.
    """
    mine = _payload(data_or_fn, stage_name, True)
    if pg is None:
        if mine.exception is not None:
            raise RuntimeError(f"all_gather failed with exception {mine.exception}") from mine.exception
        return [mine.payload]
    every: list[Any] = [None] * pg.size()
    all_gather_object_enforce_type(pg, every, mine)
    strangers = [rank for rank, each in enumerate(every) if each.stage_name != every[0].stage_name]
    text = "".join(
        f"Unexpected stage name received from rank {rank}: {every[rank].stage_name} " for rank in strangers
    )
    together = [(rank, each) for rank, each in enumerate(every) if rank not in strangers]
    failed = [(rank, each.exception) for rank, each in together if each.exception is not None]
    if failed:
        raise RuntimeError(text, failed) from failed[0][1]
    return [each.payload for _, each in together]


def all_gather_object_enforce_type(
    pg: ProcessGroup,
    object_list: list[Any],
    obj: Any,
    type_checker: Callable[[Any, Any], bool] = lambda x, y: type(x) is type(y),
) -> None:
    """Call :func:`torchestra.all_gather_object`, and compare the types of the objects.

    Args:
        pg: the group.
        object_list: filled with one object per rank.
        obj: this rank's object.
        type_checker: called with the first object and another one; returns whether they match.

    Raises:
        TypeError: on all ranks, if some do not match.
    """
    all_gather_object(object_list, obj, group=pg)
    for rank, each in enumerate(object_list):
        if not type_checker(object_list[0], each):
            raise InvalidArgumentTypeError(
                f"Object type at index {rank} is {type(each)}, while first object type is"
                f" {type(object_list[0])}"
            )


def _payload(data_or_fn: Any, stage_name: str | None, success: bool) -> SyncPayload[Any]:
    if not callable(data_or_fn):
        return SyncPayload(stage_name, success, data_or_fn)
    try:
        return SyncPayload(stage_name, success, data_or_fn())
    except Exception as error:
        return SyncPayload(stage_name, False, None, error)
