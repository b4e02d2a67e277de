"""The hang report: the lines that tell what every rank does are the same on all ranks, and true."""

from __future__ import annotations

import os
import re
import signal
import threading
from datetime import timedelta

import pytest
import torch

import torchestra as dist
from torchestra.engine.diagnosis.facts import RankFacts
from torchestra.engine.failure.hang_report import HostReport, late_elsewhere
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    RankFailedError,
)
from worlds import KINDS, Outcome, await_note, leave_note, outcomes, processes, results, set_timeout

SOON = 30.0
LINE = re.compile(r"^  rank (\d+) (.+); (.+)$")


def lines_by_rank(message: str) -> dict[int, tuple[str, str]]:
    """By rank: what it does, and where it is."""
    first, second, *lines = message.splitlines()
    assert "group 'default'" in first
    assert second.startswith("diagnosis: ")
    found = [LINE.match(line) for line in lines]
    assert all(found), message
    return {int(match[1]): (match[2], match[3]) for match in found if match}


def block(message: str) -> list[str]:
    return message.splitlines()[1:]


def await_line(rank: int, line: str) -> None:
    """Wait until the report has this text about another rank."""
    assert dist.group.WORLD is not None
    context = dist.group.WORLD.communicator.engine.context
    while line not in context.report([rank], "here", ()):
        threading.Event().wait(0.01)


def one_never_comes(late: threading.Event | None) -> str:
    """The last rank does not call the all_reduce before the others have given up."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    if rank == last:
        if late is None:
            await_note("given up")
        else:
            assert late.wait(SOON)
    if rank == 0:
        await_line(1, "is in operation 3")
        set_timeout(0.8)
    with pytest.raises((CollectiveTimeoutError, GroupAbortedError)) as caught:
        dist.broadcast(torch.ones(7000), 1)
    if rank == 0:
        leave_note("given up") if late is None else late.set()
    return str(caught.value)


def check_that_one_never_came(told: list[str]) -> None:
    last = len(told) - 1
    assert len({tuple(block(message)) for message in told}) == 1
    summary = (
        rf"timed out after \d+\.\d s on rank \d: rank {last} had not arrived \(the timeout is 0\.8 s\)\.$"
    )
    assert all(re.search(summary, message.splitlines()[0]) for message in told)
    ranks = lines_by_rank(told[0])
    assert sorted(ranks) == list(range(last + 1))
    for rank in range(last):
        doing, place = ranks[rank]
        assert re.fullmatch(
            rf"is in operation 3, broadcast\(float32, 7000 elements, root 1\), for \d+\.\d s,"
            rf" and waits for rank {last}",
            doing,
        )
        assert re.fullmatch(rf"is at {__file__}:\d+ in one_never_comes", place)
    doing, place = ranks[last]
    assert re.fullmatch(
        r"last called operation 2, all_reduce\(SUM, float64, 3 elements\), \d+\.\d s ago", doing
    )
    assert place.startswith("is at ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_out_says_the_same_on_every_rank(kind: str) -> None:
    late = threading.Event() if kind == "threads" else None
    ended = outcomes(kind, 3, one_never_comes, late)
    check_that_one_never_came(results(ended))


def await_all_reduce() -> None:
    """Wait until the ranks before this one are in operation 3."""
    for other in range(dist.get_rank()):
        await_line(other, "is in operation 3")


def wait_for_the_dead() -> str:
    """The last rank is killed while the others wait for it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.barrier()
    if rank == last:
        await_all_reduce()
        leave_note("awaited")
        await_note("never")
    with pytest.raises(RankFailedError) as caught:
        dist.all_reduce(torch.ones(5))
    assert caught.value.ranks == (last,)
    return str(caught.value)


def test_a_rank_that_was_killed_is_told_of_with_the_signal() -> None:
    with processes(3, wait_for_the_dead) as world:
        world.await_file("awaited")
        world.signal(2, signal.SIGKILL)
        zero, one, _ = world.finish()
    check_death([zero, one], "killed by SIGKILL|process [0-9]+ is gone")


def end_by_itself() -> str:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.barrier()
    if rank == last:
        await_all_reduce()
        os._exit(7)
    with pytest.raises(RankFailedError) as caught:
        dist.all_reduce(torch.ones(5))
    return str(caught.value)


def test_a_rank_that_ended_is_told_of_with_its_exit_code() -> None:
    zero, one, _ = outcomes("processes", 3, end_by_itself)
    check_death([zero, one], "exit code 7|process [0-9]+ is gone")


def check_death(ended: list[Outcome], how: str) -> None:
    told = results(ended)
    assert len({tuple(block(message)) for message in told}) == 1
    for message in told:
        assert re.search(rf"rank 2 died \(({how})\); rank \d saw it in all_reduce", message)
    ranks = lines_by_rank(told[0])
    assert ranks[0][0].startswith("is in operation 3, all_reduce(SUM, float32, 5 elements), for ")
    assert re.fullmatch(r"last called operation 2, barrier\(\), \d+\.\d s ago", ranks[2][0])
    assert re.fullmatch(rf"has died \(({how})\)", ranks[2][1])


def a_receive_that_gets_nothing() -> str:
    """Rank 0 waits for a message; rank 1, whom nothing keeps, waits for rank 0 in a collective."""
    if dist.get_rank() == 0:
        await_line(1, "is in operation 2")
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.group.WORLD.communicator.recv(torch.ones(2), 1, tag=5, timeout_s=0.8)
        dist.barrier()
        return str(caught.value)
    dist.barrier()
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_does_not_come_tells_what_the_sender_does(kind: str) -> None:
    zero, _ = outcomes(kind, 2, a_receive_that_gets_nothing)
    ranks = lines_by_rank(zero.result())
    assert ranks.keys() == {1}
    assert ranks[1][0].startswith("is in operation 2, barrier(), for ")
    assert ranks[1][0].endswith(", and waits for rank 0")


def wait_beside_a_receive() -> str:
    """Rank 1 hangs in a receive while rank 0 waits for it."""
    if dist.get_rank() == 0:
        await_line(1, "is in recv")
        set_timeout(0.8)
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.barrier()
        return str(caught.value)
    with pytest.raises(GroupAbortedError):
        dist.group.WORLD.communicator.recv(torch.ones(2), 0, tag=5, timeout_s=SOON)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_hangs_in_a_receive_is_told_of(kind: str) -> None:
    zero, _ = outcomes(kind, 2, wait_beside_a_receive)
    doing, _ = lines_by_rank(zero.result())[1]
    assert re.fullmatch(
        r"has called nothing yet, and is in recv\(float32, from rank 0, 8 bytes, tag 5\) for \d+\.\d s", doing
    )


def test_where_none_is_known_to_be_late_silent_hosts_are() -> None:
    """A host that does not answer may be slow; it is named only where there is nobody else to wait for."""
    here, silent = RankFacts(1, "h1"), RankFacts(2, "h2", presence="silent")
    reports = [HostReport(facts=(RankFacts(0, "h1"), here)), HostReport(facts=(silent,))]
    assert late_elsewhere(reports) == (["other hosts"], (2,))
    assert late_elsewhere([reports[0]._replace(missing=(1,)), reports[1]]) == (["rank 1 on host h1"], (1,))
    assert late_elsewhere(reports, late_here=(0,)) == late_elsewhere(reports[:1]) == ([], ())


def a_smaller_group_differs() -> str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(torch.ones(dist.get_rank()), group=group)
    return str(caught.value)


def test_a_mismatch_in_a_smaller_group_names_global_ranks_too() -> None:
    _, diagnosis, *lines = outcomes("threads", 3, a_smaller_group_differs)[1].result().splitlines()
    assert diagnosis.startswith("diagnosis: mismatch: rank 1 (global rank 2) called all_reduce(")
    assert "and rank 0 (global rank 1) all_reduce(" in diagnosis
    assert [line.partition(") ")[0] for line in lines[:2]] == [
        "  rank 0 (global rank 1",
        "  rank 1 (global rank 2",
    ]


def one_of_a_smaller_group_never_comes() -> str:
    """Ranks 1 and 3 are 0 and 1 of a group; 3 does not call its all_reduce before 1 has given up."""
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        dist.all_reduce(torch.ones(1), group=group)
    message = ""
    if rank == 1:
        group.set_timeout(timedelta(seconds=0.8))  # type: ignore[union-attr]
        with pytest.raises((CollectiveTimeoutError, GroupAbortedError)) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        message = str(caught.value)
    dist.barrier()  # in which the others wait meanwhile
    return message


def test_errors_of_a_smaller_group_name_global_ranks_too() -> None:
    message = outcomes("threads", 4, one_of_a_smaller_group_never_comes)[1].result()
    first, diagnosis, *lines = message.splitlines()
    assert "rank 1 (global rank 3) had not arrived" in first
    assert "rank 1 (global rank 3)" in diagnosis
    assert [line.partition(") ")[0] for line in lines] == [
        "  rank 0 (global rank 1",
        "  rank 1 (global rank 3",
    ]
