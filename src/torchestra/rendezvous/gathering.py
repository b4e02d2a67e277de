"""Gathering: how the ranks of a world make sure, through a store, that all of them have come.

A store may outlive a world: a process group is destroyed and made again, ranks are restarted. So worlds
are numbered, and each has its own keys, under its *generation*::

    rendezvous/current          "G S": the generation that ranks join now, and its size; 0 until it is set
    rendezvous/G/rank/R         the process that is rank R
    rendezvous/G/signed         how many ranks have signed
    rendezvous/G/complete       set by whoever finds all ranks there

A new rank joins the current generation. A rank that finds all ranks there first makes newcomers join the
next generation, so that none signs in a complete one, and then sets ``complete``. Since a generation is
complete only when all its ranks are there, no rank can be ahead of another by more than one. A rank that
gives up removes its name, so that it, or a process in its place, can try again.

A rank makes four requests with short answers, so meeting costs O(ranks) in all; only a rank that finds by
the count that all may be there reads all names. The count is never too low: a rank adds itself after it has
signed, whether in a free place or in that of a process that is gone, and subtracts itself after it has
removed its name. It may be too high, and then some ranks read the names in vain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torchestra.errors import InvalidArgumentError, StoreTimeoutError, named
from torchestra.store import PrefixStore, Store
from torchestra.store.base import pauses
from torchestra.store.missing_keys import missing_indices
from torchestra.store.process import ProcessIdentity
from torchestra.store.unreadable import reading


def gather(store: Store, rank: int, world_size: int, timeout_s: float, hint: str = "") -> Store:
    """Wait until all ranks have come, and return a store that only these use.

    Args:
        store: the same for all ranks.
        rank: this rank.
        world_size: how many ranks there are.
        timeout_s: how long to wait for the others.
        hint: text to add to the error if some ranks do not come.

    Raises:
        StoreTimeoutError: some ranks did not come; the error names them.
        InvalidArgumentError: another process is this rank too, or another rank gives another world_size.
    """
    worlds = PrefixStore("rendezvous", store)
    generation, agreed = _current(worlds, world_size)
    if agreed != world_size:
        raise InvalidArgumentError(
            f"rank {rank} has world_size {world_size}, but another rank at {store} has {agreed}; "
            "all ranks must have the same (WORLD_SIZE)"
        )
    here = PrefixStore(str(generation), worlds)
    _register(here, rank)
    signed = here.add("signed", 1)
    try:
        if signed >= world_size and here.check(_names(world_size)) and not _dead(here, range(world_size)):
            _open(worlds, generation, generation + 1, world_size)
            here.set("complete", b"1")
        here.wait(["complete"], timeout_s)
    except StoreTimeoutError:
        missing = missing_indices(here, _names(world_size))
        dead = _dead(here, [other for other in range(world_size) if other not in missing])
        _unregister(here, rank)
        if len(missing) == world_size - 1:
            _open(worlds, generation, generation, world_size)
        message = _missing_ranks(missing, dead, store, rank, world_size, timeout_s)
        raise StoreTimeoutError(message + hint) from None
    return PrefixStore(str(generation), store)


def newest_world(store: Store, timeout_s: float) -> Store:
    """Return what :func:`gather` has returned to the ranks of the newest complete world; wait for one.

    For a process that is none of its ranks.

    Raises:
        StoreTimeoutError: there is none after the time.
    """
    worlds = PrefixStore("rendezvous", store)
    for _ in pauses(timeout_s):
        current = worlds.compare_set("current", "", "").split()
        # The generation before the current one is complete, or will be at once.
        if current and (generation := int(current[0])) > 0:
            return PrefixStore(str(generation - 1), store)
    raise StoreTimeoutError(
        f"waited {round(timeout_s, 2):g} s at {store} to join a job, but its ranks have not met there; is it"
        " running, and does it use the same address?"
    )


def _current(worlds: Store, world_size: int) -> tuple[int, int]:
    """Return the generation to join and its size, which the first rank to join sets."""
    current = worlds.compare_set("current", "", f"0 {world_size}")
    while current.endswith(b" 0"):
        current = worlds.compare_set("current", current, current[:-1] + str(world_size).encode())
    with reading(f"the world that ranks join at {worlds}"):
        generation, agreed = map(int, current.split())
    return generation, agreed


def _open(worlds: Store, generation: int, new: int, world_size: int) -> None:
    """Make ranks that come from now on join generation ``new``, of any size, instead of this one."""
    worlds.compare_set("current", f"{generation} {world_size}", f"{new} 0")


def _name(rank: int) -> str:
    return f"rank/{rank}"


def _names(world_size: int) -> list[str]:
    return [_name(rank) for rank in range(world_size)]


def _register(here: Store, rank: int) -> None:
    """Sign this process as ``rank``; replace a process that is gone, never one that lives."""
    me = ProcessIdentity.current()
    mine = me.encode().encode()
    holder = here.compare_set(_name(rank), "", mine)
    while holder != mine:
        other = _identity(holder)
        if other.is_alive():
            raise InvalidArgumentError(
                f"two processes are rank {rank}: {other}, and {me}; every process needs a RANK of its own"
            )
        # Dead, or on another host: a rank that was restarted there is more likely than a second one.
        holder = here.compare_set(_name(rank), holder, mine)


def _dead(here: Store, signed: Sequence[int]) -> list[int]:
    """Return the ranks whose process has signed and is known to have died since."""
    names = here.multi_get([_name(rank) for rank in signed])
    return [rank for rank, name in zip(signed, names, strict=True) if _identity(name).is_dead()]


def _identity(name: bytes) -> ProcessIdentity:
    with reading("which process is a rank"):
        return ProcessIdentity.decode(name.decode())


def _unregister(here: Store, rank: int) -> None:
    # A store that cannot delete keys keeps the name, which does not harm a later try of this process.
    with contextlib.suppress(NotImplementedError):
        here.delete_key(_name(rank))
        here.add("signed", -1)


def _missing_ranks(
    missing: list[int], dead: list[int], store: Store, rank: int, world_size: int, timeout_s: float
) -> str:
    waited = f"rank {rank} of {world_size} waited {round(timeout_s, 2):g} s at {store}"
    if not missing and not dead:
        return f"{waited}; the last ranks came just then, so the time-out is too short"
    reasons = []
    if missing:
        reasons.append(f"for {named(missing, 16)} to come")
    if dead:
        reasons.append(f"with {named(dead, 16)}, whose process has died")
    why = " and ".join(reasons)
    return f"{waited} {why}; are all running, and do all use the same address?"
