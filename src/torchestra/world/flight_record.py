"""The flight record of a group: the last operations of its ranks."""

from __future__ import annotations

from torchestra.arguments.annotations import checked
from torchestra.engine.recorder.flight_entries import FlightEntry, HostRecord, RankRecord
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, default_group

__all__ = ["FlightEntry", "FlightRecord", "HostRecord", "RankRecord", "flight_record"]


@checked
def flight_record(group: AnyGroup | None = None) -> FlightRecord:
    """Return the last 256 collectives and 256 messages of every rank of a group, with times and sizes.

    Any single rank may call it, without the other ranks' taking part. Ranks that have died since are
    included, and the record stays readable after the group was aborted or destroyed. Ranks always record, so
    there is nothing to switch on.

    If the group spans several hosts, this rank asks the other hosts, and converts their times to its own
    clock. This takes some seconds at most. If a host does not answer, or this rank has destroyed the group,
    ``record.hosts`` says so, and the ranks of that host are ``"unknown"``.

    Args:
        group: default: the default group.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: this rank is not in the group, or there is no record: the group is a fake one,
            or its ranks have not met because it was never used.
        InvalidArgumentTypeError: ``group`` is not a group.
    """
    chosen = default_group() if group is None else group
    if isinstance(chosen, ProcessGroup):
        communicator = chosen.communicator
        if not communicator.has_met:
            raise InvalidArgumentError(
                f"flight_record: {chosen!r} was not used yet, so its ranks have not met"
            )
        record = communicator.engine.flight_record()
        if record is not None:
            return record
        raise InvalidArgumentError(f"flight_record: {chosen!r} does nothing that could be recorded")
    if hasattr(chosen, "group_name"):
        raise InvalidArgumentError(f"flight_record: this rank is {chosen!r}")
    raise InvalidArgumentTypeError(f"flight_record: `group` must be a ProcessGroup, got {chosen!r}")
