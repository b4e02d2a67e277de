"""The hang report, at the end of errors of a stuck or broken group: a diagnosis, and a line for each rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torchestra.engine.diagnosis.facts import RankFacts
from torchestra.engine.diagnosis.rules import diagnose
from torchestra.engine.failure.collecting import RankView, collect_facts, global_rank


class HostReport(NamedTuple):
    """What the ranks of a host do: in lines, and in facts for the diagnosis.

    ``missing`` is set for other hosts: the ranks that have not begun the operation of the rank that asked.
    """

    lines: str = ""
    facts: tuple[RankFacts, ...] = ()
    missing: tuple[int, ...] = ()


def host_report(
    view: RankView, ranks: Iterable[int], shown: Collection[int], dead: Collection[int], site: str
) -> HostReport:
    """Return the report of the ranks of this host; arguments and time as of collect_facts().

    Args:
        shown: which ranks have a line.
    """
    ranks = list(ranks)
    facts = collect_facts(view, ranks, dead, site)
    lines = [rank_line(each) for rank, each in zip(ranks, facts, strict=True) if rank in shown]
    return HostReport((f"\nhost {view.host}:" if view.host else "") + "".join(lines), tuple(facts))


def silent_report(
    host: str,
    ranks: Iterable[int],
    global_ranks: Sequence[int],
    dead: Collection[int],
    left: Collection[int],
    seen: str,
) -> HostReport:
    """Return the report of the ranks of a host that does not answer; ``seen``: where one of them was last."""
    facts = tuple(
        RankFacts(
            rank,
            host,
            presence="dead" if rank in dead else "left" if rank in left else "silent",
            end_reason="its host says so",
            global_rank=global_rank(rank, global_ranks),
            doing="is on a host that does not answer",
            last_seen=f"at {seen}" if seen else "",
        )
        for rank in ranks
    )
    return HostReport(f"\nhost {host} does not answer", facts)


def late_elsewhere(
    elsewhere: Sequence[HostReport], late_here: Collection[int] = ()
) -> tuple[list[str], tuple[int, ...]]:
    """Return the names and numbers of ranks of other hosts that have not come to an operation.

    Where no rank is known to be late, nor any of this host, they are those of the hosts that do not answer.
    """
    if late := [each for host in elsewhere for each in host.facts if each.rank in host.missing]:
        names = [str(each) for each in late]
    else:
        silent = [each for host in elsewhere for each in host.facts if each.presence == "silent"]
        late = [] if late_here else silent
        names = ["other hosts"] if late else []
    return names, tuple(each.rank for each in late)


def hang_report(reports: Sequence[HostReport], waiting: int) -> str:
    """Return the report of what is known of a group's ranks.

    Args:
        reports: of each host's ranks.
        waiting: the rank that gave up.
    """
    found = diagnose([facts for each in reports for facts in each.facts], waiting)
    return f"\n{found}" + "".join(each.lines for each in reports)


def rank_line(facts: RankFacts) -> str:
    """Return the line of a rank: its current or last call, whom it waits for, where its program is."""
    if facts.presence == "dead":
        state = f"has died ({facts.end_reason})"
    elif facts.presence == "left":
        state = "has destroyed the group"
    elif facts.program is not None:
        state = facts.program.location
    elif facts.stack:
        state = f"does not answer; is at {facts.stack[0]}"
    else:
        seen = f"; last seen {facts.last_seen}" if facts.last_seen else ""
        state = f"did not say where it is{seen}"
    return f"\n  {facts.name} {facts.doing}; {state}"
