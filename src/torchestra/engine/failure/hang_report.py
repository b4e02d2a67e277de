"""The hang report: a line for each rank, at the end of the errors of a stuck or broken group."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torchestra.engine import layout as at
from torchestra.engine.failure.liveness import Peers
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.flight_entries import RankRecord
from torchestra.engine.recorder.flight_record import read_rank, tick_scale
from torchestra.system.deadline import Deadline

_ANSWER_SECONDS = 0.5
_LOOK_SECONDS = 0.002
_ENTRIES = 16  # of a rank, its last: enough to find the message that it hangs in


def hang_report(
    arena: Arena, peers: Peers | None, ranks: Iterable[int], dead: Collection[int], own: tuple[int, str]
) -> str:
    """Return a line for each of the ranks: its current or last call, whom it waits for, where its program is.

    Takes half a second if a rank does not answer, and longer on a busy host.

    Args:
        peers: tells where a rank is and how it died; None while they are not known.
        ranks: which to report on.
        dead: those that are known to have died.
        own: the rank that asks, and the line of its program.
    """
    ranks = list(ranks)
    where = _places(arena, peers, [rank for rank in ranks if rank not in dead and rank != own[0]])
    if own[0] in ranks:
        where[own[0]] = f"is at {own[1]}"
    scale = tick_scale(arena)
    crosses = arena.word(at.HEADER_GROUP_SIZE) > 0
    lines = []
    for rank in ranks:
        record = read_rank(arena, rank, scale, _ENTRIES)
        if rank in dead:
            how = "its process is gone" if peers is None else peers.how(rank)
            state = f"has died ({how})"
        elif record.presence == "left":
            state = "has destroyed the group"
        else:
            state = where[rank]
        lines.append(f"\n  rank {record.rank} {_doing(record, scale.now, crosses)}; {state}")
    return "".join(lines)


def _doing(record: RankRecord, now: float, crosses: bool) -> str:
    """Return the last operation of a rank, and the message that it blocks in."""
    last = record.last_operation
    if last is None or (last.number == 1 and last.state == "done" and not crosses):
        words = "has called nothing yet"  # the first operation of a group on one host is its own
    elif last.state == "running":
        words = f"is in operation {last.number}, {last}, for {now - last.started:.1f} s"
        awaited = record.waiting_for if record.waiting_for is not None else last.waited_for
        if awaited is not None:
            words += f", and waits for rank {awaited}"
        elif crosses and record.waiting_since is not None:
            words += ", and waits for other hosts"
    else:
        ended = now - (last.ended or now)
        how = "" if last.state == "done" else ", which failed"
        words = f"last called operation {last.number}, {last}{how}, {ended:.1f} s ago"
    if (message := record.running_message) is not None:
        words += f", and is in {message} for {now - message.started:.1f} s"
    return words


def _places(arena: Arena, peers: Peers | None, ranks: list[int]) -> dict[int, str]:
    """Return where the programs of other ranks are, as far as they say in time."""
    sites = {rank: peers.site(rank) if peers is not None else None for rank in ranks}
    silent = [rank for rank in ranks if sites[rank] is None and not _has_left(arena, rank)]
    tickets = {
        rank: shared_words.increment_and_wake(arena.address + arena.control(rank) + at.ASKED)
        for rank in silent
    }
    # A step counts as long as it should take: where the host is busy, the ranks that answer get longer, too.
    for _ in Deadline(_ANSWER_SECONDS, _LOOK_SECONDS).polls(_LOOK_SECONDS):
        for rank in tuple(silent):
            block = arena.control(rank)
            if shared_words.load_acquire(arena.address + block + at.ANSWERED) >= tickets[rank]:
                length = shared_words.load_acquire(arena.address + block + at.ANSWER_LENGTH)
                sites[rank] = arena.text(block + at.ANSWER, length)
                silent.remove(rank)
        if not silent:
            break
    return {rank: place or "did not say where it is" for rank, place in sites.items()}


def _has_left(arena: Arena, rank: int) -> bool:
    return arena.word(arena.control(rank) + at.STATE) == at.LEFT
