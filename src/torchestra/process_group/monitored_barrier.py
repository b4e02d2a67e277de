"""The monitored barrier: a barrier that names the ranks that did not come.

It consists of messages, not of the group's own barrier, so that it does not queue behind operations that
hang. Each rank tells rank 0 that it has come, and waits for the reply; rank 0 waits for all, then replies to
all. Only rank 0 watches the time-out, so that it is always the rank that names the missing ones. If any are
missing, it aborts the group: this tells the ranks that wait for the reply, and those that come later.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.p2p.tags import ARRIVED, PASSED
from torchestra.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError, RankFailedError
from torchestra.system.deadline import Deadline


def monitored_barrier(communicator: Communicator, seconds: float | None, wait_all_ranks: bool) -> None:
    """Return when all ranks of the group have called. Must be called by all of them.

    Args:
        seconds: how long rank 0 waits for the others; default: the group's time-out.
        wait_all_ranks: have rank 0 wait for all ranks, and name all that do not come; else it names the one
            with the lowest number.

    Raises:
        CollectiveTimeoutError, RankFailedError, GroupAbortedError: as torchestra.monitored_barrier.
    """
    limit = communicator.limit(seconds)
    # Messages left over from a barrier that a rank has left would be taken for those of the next one.
    with communicator.queue.abort_on_error("monitored_barrier"):
        if communicator.rank == 0:
            _wait_for_all(communicator, limit, wait_all_ranks)
        else:
            _report_to_rank_0(communicator, max(limit, communicator.timeout_s))


def _report_to_rank_0(communicator: Communicator, limit: float) -> None:
    token = torch.zeros(1, dtype=torch.int64)
    try:
        communicator.send(token, 0, ARRIVED, limit)
        communicator.recv(token, 0, PASSED, limit)
    except (GroupAbortedError, CollectiveTimeoutError) as error:
        message = (
            f"Rank {communicator.rank} successfully reached monitoredBarrier, but received errors while"
            " waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original"
            f" exception:\n{error}"
        )
        if isinstance(error, RankFailedError):
            raise RankFailedError(message, error.ranks) from error
        if isinstance(error, CollectiveTimeoutError):
            raise CollectiveTimeoutError(message, error.missing) from error
        raise GroupAbortedError(message) from error


def _wait_for_all(communicator: Communicator, limit: float, wait_all_ranks: bool) -> None:
    deadline = Deadline(limit)
    others = range(1, communicator.size)
    arrivals = {
        rank: communicator.irecv(torch.zeros(1, dtype=torch.int64), rank, ARRIVED, limit) for rank in others
    }
    failures: dict[int, DistBackendError] = {}
    for rank, arrival in arrivals.items():
        if not wait_all_ranks and deadline.expired() and not arrival.is_completed():
            _time_is_over(communicator, limit, rank, arrivals)
        error = _failure(arrival)
        if error is not None:
            failures[rank] = error
            if not wait_all_ranks or isinstance(error, RankFailedError):
                break
    if not failures:
        token = torch.zeros(1, dtype=torch.int64)
        words = {rank: communicator.isend(token, rank, PASSED, limit) for rank in others}
        failures = {rank: error for rank, word in words.items() if (error := _failure(word)) is not None}
    if failures:
        _give_up(communicator, limit, failures, wait_all_ranks)


def _failure(work: Work) -> DistBackendError | None:
    try:
        work.wait()
    except (GroupAbortedError, CollectiveTimeoutError) as error:
        return error
    return None


def _time_is_over(communicator: Communicator, limit: float, rank: int, arrivals: dict[int, Work]) -> NoReturn:
    passed = ", ".join(str(peer) for peer, arrival in arrivals.items() if arrival.is_success())
    processed = f"Successfully processed ranks: {passed}" if passed else "No ranks successfully processed"
    message = (
        f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit * 1000:.0f} ms, before rank {rank}"
        " came.\n"
        f" {processed} in monitoredBarrier."
    )
    communicator.abort(message)
    raise CollectiveTimeoutError(message, (rank,))


def _give_up(
    communicator: Communicator, limit: float, failures: dict[int, DistBackendError], wait_all_ranks: bool
) -> NoReturn:
    """Raise an error on rank 0 that names the missing ranks; abort the group, which tells the others."""
    dead = next((error for error in failures.values() if isinstance(error, RankFailedError)), None)
    missing = tuple(failures) if dead is None else dead.ranks
    named = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
    told = "\n".join(dict.fromkeys(map(str, failures.values())))
    message = (
        f"[Rank 0]: {named} failed to pass monitoredBarrier in {limit * 1000:.0f} ms\n Original"
        f" exception:\n{told}"
    )
    if dead is not None:
        raise RankFailedError(message, missing)
    timed_out = all(isinstance(error, CollectiveTimeoutError) for error in failures.values())
    if not timed_out:
        raise GroupAbortedError(message)
    communicator.abort(message)
    raise CollectiveTimeoutError(message, missing)
