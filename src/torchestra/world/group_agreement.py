"""The agreement on groups that ranks make together: all must make the same.

Before a rank makes groups, it announces them in the store, in one request, under the name of the first of
them: the first rank to come writes its lists there, and every other rank compares its own with them. A rank
whose lists differ replaces them by a description of the difference, which all later ranks find, and tells the
ranks that have gone on and wait for the others in the groups. Only ranks with the same lists as the first go
on, so none waits in a different group. A rank that waits in a backend that is not torchestra's, or for
another host, is not told; but a rank that fails, even by a time-out, looks here for the reason.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torchestra.arguments.annotations import check_integer
from torchestra.errors import CollectiveMismatchError, DistError, InvalidArgumentError, shown
from torchestra.process_group import ProcessGroup
from torchestra.process_group.starting import refuse
from torchestra.store.collective_errors import raise_on_all_ranks
from torchestra.store.unreadable import reading
from torchestra.world.registry import compact

_FEW = 16
_MOST_RANKS = 1 << 20  # of a group, as another rank tells them
_MISMATCH, _CALL = b"x", b"c"  # the first byte of the value in the store


class GroupCall(NamedTuple):
    """Describe a rank's call of a function that makes groups.

    Attributes:
        rank: the global rank that calls.
        groups: the global ranks of each group that it makes, by the group's name.
    """

    function: str
    rank: int
    groups: Mapping[str, Sequence[int]]

    def encode(self) -> bytes:
        """Return the call as bytes; evenly spaced ranks take few."""
        lists = [compact(ranks) for ranks in self.groups.values()]
        told = [
            {"range": [ranks.start, ranks.stop, ranks.step]} if isinstance(ranks, range) else ranks
            for ranks in lists
        ]
        return _CALL + json.dumps([self.function, self.rank, list(self.groups), told]).encode()

    @staticmethod
    def decode(text: bytes) -> GroupCall:
        """Return the call that :meth:`encode` has encoded.

        Raises:
            DistStoreError: it is something else.
        """
        with reading("what groups another rank makes, in the store"):
            function, rank, names, told = json.loads(text[len(_CALL) :])
            if text[: len(_CALL)] != _CALL or type(function) is not str or type(rank) is not int:
                raise ValueError(f"no call: {text!r:.100}")
            if not all(type(name) is str for name in names):
                raise ValueError(f"no names of groups: {names!r:.100}")
            return GroupCall(function, rank, dict(zip(names, map(_ranks, told), strict=True)))

    @property
    def lists(self) -> list[Sequence[int]]:
        """Return the ranks of each group, in a form in which equal lists compare equal."""
        return [compact(ranks) for ranks in self.groups.values()]

    def difference(self, first: GroupCall) -> str:
        """Describe how this call differs from the first rank's; return an empty text if it does not."""
        if (self.function, self.lists) == (first.function, first.lists):
            return ""
        other = "it" if first.function == self.function else first.function
        return (
            f"rank {self.rank} called {self.function} with {_text(self.lists)}, but rank {first.rank} called"
            f" {other} with {_text(first.lists)}{_detail(self.lists, first.lists)}; all ranks must make the"
            " same groups in the same order. The groups made before stay usable"
        )


@contextlib.contextmanager
def same_call(parent: ProcessGroup, key: str, call: GroupCall) -> Iterator[None]:
    """Run the block, which makes groups, if all ranks make the same ones.

    Args:
        key: the key of the call, the same on all ranks that should call and never used before.

    Raises:
        CollectiveMismatchError: another rank makes other groups; raised on every rank that has not made its
            own yet.
    """
    key = f"new_group/{key}"
    with raise_on_all_ranks(parent.store, key, parent.size(), CollectiveMismatchError):
        _check_same(parent, key, call)
        try:
            yield
        except Exception as error:
            said = b""
            with contextlib.suppress(DistError, OSError):
                said = parent.store.get(key)
            if said[:1] == _MISMATCH:
                _mismatch(said, error)
            raise


def _check_same(parent: ProcessGroup, key: str, call: GroupCall) -> None:
    """Compare a call with the first rank's; raise as :func:`same_call` does if they differ."""
    mine = call.encode()
    said = parent.store.compare_set(key, "", mine)
    if said == mine:
        return
    if said[:1] == _MISMATCH:
        _mismatch(said)
    first = GroupCall.decode(said)
    if difference := call.difference(first):
        # Several ranks may find a difference at once: all raise the first one that was described.
        verdict = parent.store.compare_set(key, said, _MISMATCH + difference.encode())
        for name, ranks in first.groups.items():
            hosts = None if parent.maker is not None else parent.communicator.hosts_among(ranks)
            refuse(parent.store, name, hosts, difference)
        _mismatch(verdict)


def _ranks(told: Any) -> Sequence[int]:
    """Return the ranks of a group from JSON; ValueError and the like: it has none."""
    ranks = range(*told["range"]) if isinstance(told, dict) else tuple(told)
    if len(ranks) > _MOST_RANKS or not all(type(each) is int and each >= 0 for each in ranks):
        raise ValueError(f"not ranks: {told!r:.100}")
    return ranks


def _mismatch(theirs: bytes, cause: BaseException | None = None) -> NoReturn:
    raise CollectiveMismatchError(theirs[len(_MISMATCH) :].decode(errors="replace")) from cause


def _text(lists: Sequence[Sequence[int]]) -> str:
    if len(lists) == 1:
        return f"the ranks {shown(list(lists[0]))}"
    return f"the lists {shown([list(ranks) for ranks in lists])}"


def _detail(mine: Sequence[Sequence[int]], first: Sequence[Sequence[int]]) -> str:
    """Return where two calls differ, if their lists, as the message shows them, do not tell."""
    if len(mine) != len(first):
        return f" ({len(mine)} and {len(first)} groups)" if len(mine) > 1 or len(first) > 1 else ""
    if mine == first:
        return ""
    number = next(index for index, own in enumerate(mine) if own != first[index])
    own, other = mine[number], first[number]
    where = f"in list {number}, " if len(mine) > 1 else ""
    if set(own) == set(other):
        return f" ({where}the same ranks in another order: is sort_ranks the same?)"
    if where or len(own) > _FEW or len(other) > _FEW:
        without, added = sorted(set(other) - set(own)), sorted(set(own) - set(other))
        return f" ({where}only the one has {shown(added)}, and only the other {shown(without)})"
    return ""


def checked_ranks(ranks: Sequence[int], size: int) -> Sequence[int]:
    """Return global ranks, as a range if they are many and evenly spaced.

    Raises:
        InvalidArgumentError: there are none, or some repeat or do not exist in a world of that size.
    """
    if (
        isinstance(ranks, range)
        and ranks
        and 0 <= min(ranks[0], ranks[-1]) <= max(ranks[0], ranks[-1]) < size
    ):
        return ranks
    chosen = tuple(check_integer(rank, "ranks", "new_group") for rank in ranks)
    if not chosen:
        raise InvalidArgumentError(f"new_group: ranks must not be empty, got {shown(ranks)}")
    if len(set(chosen)) != len(chosen):
        raise InvalidArgumentError(
            f"new_group: ranks list must not contain duplicate entries, got {shown(list(chosen))}"
        )
    if len(chosen) > size:
        raise InvalidArgumentError(
            "new_group: the new group's world size should be less or equal to the world size set by"
            f" init_process_group, which is {size}; got {len(chosen)} ranks"
        )
    for rank in chosen:
        if not 0 <= rank < size:
            raise InvalidArgumentError(
                f"new_group: Rank {shown(rank)} is out of range. Valid ranks are 0 to {size - 1}"
                f" (world_size={size}), in `ranks`"
            )
    return chosen if len(chosen) <= _FEW else compact(chosen)
