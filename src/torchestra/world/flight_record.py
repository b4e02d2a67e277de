"""The flight record of a group: what its ranks did last."""

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

    Called by any one rank; the programs of the others know nothing of it. What ranks did that have died since
    is told too, and everything stays readable when the group was aborted or destroyed. Ranks record always,
    so there is nothing to switch on.

    Where the group is on several hosts, the others are asked, and their times are turned into those of this
    one's clock. It takes some seconds at most; of hosts that do not answer, and after this rank has destroyed
    the group, ``record.hosts`` says so, and their ranks are ``"unknown"``.

    Args:
        group: default: the default group.

    Raises:
        NotInitializedError: there is no default group.
        InvalidArgumentError: this rank is not in the group, or there is nothing to record: the group is a
            fake one, or its ranks have not met because it was never used.
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
