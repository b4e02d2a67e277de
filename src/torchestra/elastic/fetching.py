"""Bring state from ranks that have it to ranks that want it.

All ranks of the group take part. (1) The first source of each item tells how it is built: its skeleton, which
has a TensorSpec for each tensor, and with it the bytes of a short item; and each source tells where it puts
blocks. (2) Each target says which blocks it wants: all, or those whose checksum differs (between hosts, and
where it has got some before), but none that has come already. Every rank finds the same plan from this. (3)
Each source sends its share of each target's blocks, straight from and into the tensors: within a host through
memory of its own that both address (staging.py), else as messages, all at once. (4) The sources tell the
checksums of what they sent, through memory together with each block, and a block that arrived otherwise is
wanted again, from another source.

A rank whose own state is whole, one step behind, receives into other memory and takes it over when all is
verified: should the sources die on the way, it still has what it had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchestra.collectives.functions import irecv, isend
from torchestra.collectives.objects import all_gather_object
from torchestra.communicator.work import Work
from torchestra.elastic import staging
from torchestra.elastic.blocks import BLOCK_BYTES, Block, Receiving, TensorBlocks, blocks_of, bytes_of
from torchestra.elastic.parts import (
    flatten_tensors,
    have_same_tensors,
    paths_of,
    tensor_specs_of,
    unflatten_tensors,
)
from torchestra.engine.memory.mapping import prefer_huge_pages
from torchestra.errors import DistError, InvalidArgumentError, named
from torchestra.process_group import ProcessGroup

_MAX_ROUNDS = 4
_SHORT_BYTES = 64 << 10  # of an item that is told at once: a step of the exchange takes longer
_HUGE_FROM_BYTES = 4 << 20  # two huge pages, of which one may have its place at an end


class Signature(NamedTuple):
    """Hold what a target has of a value, as it was some time ago; rsync's word for checksums of blocks.

    Attributes:
        skeleton: how the value was built then; the target's own value is built so.
        checksums: of the blocks that it has, by their place among all blocks.
    """

    skeleton: Any
    checksums: Mapping[int, int]


class Item(NamedTuple):
    """Describe a value to fetch; all ranks give the same items, each with its own value.

    Attributes:
        value: this rank's own, nested: what a source sends, or what is like it for a target to receive into.
        sources: ranks with the value, which is the same on all of them.
        targets: ranks that want it.
        whole: this rank's own value must not be touched before all has arrived.
        signature: what this rank has of it already, if it is a target; blocks are moved that are not so any
            more. None on all ranks: no target has any.
    """

    value: Any
    sources: Sequence[int]
    targets: Sequence[int]
    whole: bool
    signature: Signature | None = None


class Fetched(NamedTuple):
    """Hold what a rank has received.

    Attributes:
        values: the nested values, by the item's number.
        bytes: how many were received, those received twice included.
        differing: how many blocks arrived with another checksum, and were fetched again.
    """

    values: dict[int, Any]
    bytes: int
    differing: int


def gathered(group: ProcessGroup, value: Any) -> list[Any]:
    """Return the objects of all ranks, by rank."""
    values: list[Any] = [None] * group.size()
    all_gather_object(values, value, group=group)
    return values


def fetch(group: ProcessGroup, items: Sequence[Item]) -> Fetched:
    """Bring items from their sources to their targets; every rank of the group calls this.

    When this returns on a rank, all targets have received all and have verified it; but it may still fail on
    a target, if a rank dies meanwhile.

    Returns:
        What this rank has received.

    Raises:
        InvalidArgumentError: this rank's model has other tensors than the sources'.
        DistError: so it is on another rank; or data arrived damaged again and again.
    """
    apart = [flatten_tensors(item.value) for item in items]
    me = group.rank()
    sent = [index for index, item in enumerate(items) if me in item.sources]
    targets = sorted({rank for index in sent for rank in items[index].targets})
    nbytes = sum(tensor.nbytes for index in sent for tensor in apart[index][1])
    slots = staging.Slots(group, len(targets) if nbytes >= staging.MIN_BLOCKS * BLOCK_BYTES else 0)
    described = {index: _describe(*apart[index]) for index in sent if items[index].sources[0] == me}
    told: list[_Told] = gathered(group, _Told(described, slots.offset, targets))
    of_item = _joined([each.described for each in told])
    first = itertools.count()
    moved = [_Moved(group, item, of_item[index], first) for index, item in enumerate(items)]
    refusal = None
    for each, (skeleton, tensors) in zip(moved, apart, strict=True):
        refusal = refusal or each.prepare(skeleton, tensors)
    return _Exchange(group, moved, told).run(refusal)


class _Description(NamedTuple):
    """Hold what the first source of an item tells of it.

    Attributes:
        skeleton: how it is built.
        block: the bytes of its one block, if it is short.
        checksum: that block's.
    """

    skeleton: Any
    block: torch.Tensor | None = None
    checksum: int = 0


def _describe(skeleton: Any, tensors: list[torch.Tensor]) -> _Description:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if not 0 < nbytes <= _SHORT_BYTES:
        return _Description(skeleton)
    (block,) = blocks_of(tensor_specs_of(skeleton))
    copied = torch.empty(nbytes, dtype=torch.uint8)
    blocks = TensorBlocks([tensor.contiguous() for tensor in tensors])
    return _Description(skeleton, copied, blocks.copy_out(block, copied.data_ptr()))


class _Told(NamedTuple):
    """Hold what a rank says before blocks are moved.

    Attributes:
        described: by the item's number, of those that it is the first source of.
        offset: of its places for blocks, in its heap; None if it has none.
        targets: the ranks that it sends to.
    """

    described: dict[int, _Description]
    offset: int | None
    targets: list[int]


class _Round(NamedTuple):
    """Hold what a rank has sent and received in a round.

    Attributes:
        came: the numbers of the blocks that came.
        bad: those of them that came damaged, as far as is known.
        unverified: checksums of those that came by messages, as they arrived.
        sums: checksums of those that went by messages.
    """

    came: list[int]
    bad: list[int]
    unverified: dict[int, int]
    sums: dict[int, int]


class _Moved:
    """Hold an item's blocks, which have numbers that differ from those of other items.

    Attributes:
        item: as given.
        numbers: of its blocks.
        is_told: whether the only block was told.
        lacks: the blocks that this rank wants and has not got; known when it is prepared.
    """

    def __init__(self, group: ProcessGroup, item: Item, told: _Description, numbers: Iterator[int]) -> None:
        self.group, self.item, self.skeleton = group, item, told.skeleton
        self._told, self.is_told = told, told.block is not None
        self.specs = tensor_specs_of(self.skeleton)
        self._blocks = {next(numbers): block for block in blocks_of(self.specs)}
        self.numbers = list(self._blocks)
        self.sends, self.receives = group.rank() in item.sources, group.rank() in item.targets
        self.lacks = self.numbers if self.receives else []
        # Between hosts a checksum costs less than the block; through memory as much, unless it is known.
        self.compares = item.signature is not None or group.communicator.engine.hosts is not None
        self._tensors: list[torch.Tensor] = []
        had = item.signature
        self._checksums = had.checksums if had and have_same_tensors(had.skeleton, self.skeleton) else {}

    def prepare(self, skeleton: Any, tensors: list[torch.Tensor]) -> str | None:
        """Find the memory to send or to receive into; return why there is none, if so."""
        refusal = None
        if self.sends:
            self._tensors = [tensor.contiguous() for tensor in tensors]
        elif self.receives:
            self._tensors, refusal = self._targets(skeleton, tensors)
        self.tensor_blocks = TensorBlocks(self._tensors)
        bytes_told = self._told.block
        if bytes_told is not None and self.receives and refusal is None:
            block = self.block(self.numbers[0])
            if self.tensor_blocks.copy_in(block, bytes_told.data_ptr()) == self._told.checksum:
                self.lacks = []
        return refusal

    def block(self, number: int) -> Block:
        return self._blocks[number]

    def checksum(self, number: int) -> int:
        return self.tensor_blocks.checksum(self.block(number))

    def own_checksum(self, number: int) -> int | None:
        """Return the checksum of what a target has of a block; None if it has nothing of it."""
        if self.item.signature is None:
            return self.checksum(number)
        return self._checksums.get(number - self.numbers[0])

    def value(self) -> Any:
        """Return what has been received."""
        return unflatten_tensors(self.skeleton, self._tensors)

    def _targets(self, skeleton: Any, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], str | None]:
        """Return where to receive, by tensor: own tensors, copies of them, or new ones; or why not."""
        mine = paths_of(skeleton)
        targets: list[torch.Tensor] = []
        for path, index in paths_of(self.skeleton).items():
            spec = self.specs[index]
            if path not in mine:
                targets.append(new_tensor(spec.shape, spec.dtype, spec.device))
                continue
            own = tensors[mine[path]]
            if (own.dtype, tuple(own.shape)) != (spec.dtype, spec.shape):
                return [], (
                    f"{'.'.join(map(str, path))} is of {own.dtype} and shape {list(own.shape)} on rank"
                    f" {self.group.rank()}, but of {spec.dtype} and shape {list(spec.shape)} on rank"
                    f" {self.item.sources[0]}"
                )
            if self.item.whole or not own.is_contiguous():
                # If blocks are compared, those that are alike stay.
                copied = own.clone(memory_format=torch.contiguous_format) if self.compares else None
                own = new_tensor(own.shape, own.dtype, own.device) if copied is None else copied
            targets.append(own)
        return targets, None

    def plan(self, wanted: list[list[int]], turn: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield source, target, and the blocks that go from one to the other.

        Args:
            wanted: by rank, the numbers of blocks, also of other items.
            turn: how often blocks were fetched before; those fetched again come from another source.
        """
        numbers, sources = set(self.numbers), self.item.sources
        count = len(sources)
        for rank in self.item.targets:
            blocks = [each for each in wanted[rank] if each in numbers]
            for place in range(count):
                yield sources[place], rank, [each for each in blocks if (each + turn) % count == place]


class _Exchange:
    """Move the blocks of all items; the plan is the same on all ranks."""

    def __init__(self, group: ProcessGroup, moved: list[_Moved], told: list[_Told]) -> None:
        self.group, self.moved, self._told = group, moved, told
        self._of_block = {number: each for each in moved for number in each.numbers}

    def run(self, refusal: str | None) -> Fetched:
        """Send and receive until all targets have what they want."""
        wanted = self._gather_wanted(self._wanted(refusal))
        came = [number for each in self.moved if each.is_told and each.receives for number in each.numbers]
        count, differing = self._bytes(came), sum(len(each.lacks) for each in self.moved if each.is_told)
        for turn in range(_MAX_ROUNDS):
            if not any(wanted):
                break
            moved = self._move(wanted, turn)
            count += self._bytes(moved.came)
            bad, told = moved.bad, gathered(self.group, (moved.bad, moved.sums))
            wanted = [theirs for theirs, _ in told]
            if theirs := _joined([sums for _, sums in told]):
                bad += [number for number, own in moved.unverified.items() if own != theirs[number]]
                wanted = self._gather_wanted(bad)
            differing += len(bad)
        if any(wanted):
            raise self._damaged(wanted)
        values = {index: each.value() for index, each in enumerate(self.moved) if each.receives}
        return Fetched(values, count, differing)

    def _bytes(self, numbers: Sequence[int]) -> int:
        return sum(bytes_of(self._of_block[number].block(number)) for number in numbers)

    def _wanted(self, refusal: str | None) -> list[int] | str:
        """Return the blocks that this rank wants, without those that are alike; or the refusal."""
        numbers = [number for each in self.moved for number in each.lacks]
        compared = [each for each in self.moved if each.compares and not each.is_told]
        if not compared:
            return numbers if refusal is None else refusal
        shares = {
            number: each.checksum(number)
            for each in compared
            if each.sends
            for number in each.numbers[each.item.sources.index(self.group.rank()) :: len(each.item.sources)]
        }
        theirs = _joined(gathered(self.group, shares))
        if refusal is not None:
            return refusal
        # A block that was told, and came damaged, is not among theirs.
        return [
            number for number in numbers if self._of_block[number].own_checksum(number) != theirs.get(number)
        ]

    def _move(self, wanted: list[list[int]], turn: int) -> _Round:
        """Send and receive one round."""
        streams: list[staging.Stream] = []
        receiving, sending = [], []
        for (source, target), numbers in self._plan(wanted, turn).items():
            if (address := self._address(source, target, len(numbers))) is not None:
                streams.append(staging.Stream(source, target, numbers, address))
            elif target == self.group.rank():
                receiving += [self._receive(number, source) for number in numbers]
            else:
                sending += [self._send(number, target) for number in numbers]
        came, bad = staging.move(self.group, streams, self._copy_out, self._copy_in)
        sums: dict[int, int] = {}
        unverified: dict[int, int] = {}
        for number, works in sending:
            wait_for(works)
            if number not in sums:  # what was just sent is still in the processor's cache
                sums[number] = self._of_block[number].checksum(number)
        for number, into, works in receiving:
            wait_for(works)
            into.finish()
            unverified[number] = self._of_block[number].checksum(number)
        return _Round([*came, *unverified], bad, unverified, sums)

    def _plan(self, wanted: list[list[int]], turn: int) -> dict[tuple[int, int], list[int]]:
        """Return the blocks that this rank sends or receives, by source and target."""
        plan: dict[tuple[int, int], list[int]] = {}
        for moved in self.moved:
            for source, target, numbers in moved.plan(wanted, turn):
                if numbers and self.group.rank() in (source, target):
                    plan.setdefault((source, target), []).extend(numbers)
        return plan

    def _address(self, source: int, target: int, blocks: int) -> int | None:
        """Return where the source's places for a target are, None if blocks go by messages."""
        heap = self.group.communicator.engine.heap_of(source)
        _, offset, targets = self._told[source]
        if heap is None or offset is None or blocks < staging.MIN_BLOCKS:
            return None
        if self.group.communicator.engine.heap_of(target) is None:
            return None
        return heap + offset + targets.index(target) * staging.SLOTS * BLOCK_BYTES

    def _copy_out(self, number: int, address: int) -> int:
        moved = self._of_block[number]
        return moved.tensor_blocks.copy_out(moved.block(number), address)

    def _copy_in(self, number: int, address: int) -> int:
        moved = self._of_block[number]
        return moved.tensor_blocks.copy_in(moved.block(number), address)

    def _send(self, number: int, target: int) -> tuple[int, list[Work | None]]:
        moved = self._of_block[number]
        messages = moved.tensor_blocks.to_send(moved.block(number))
        return number, [isend(each, group=self.group, group_dst=target) for each in messages]

    def _receive(self, number: int, source: int) -> tuple[int, Receiving, list[Work | None]]:
        moved = self._of_block[number]
        into = moved.tensor_blocks.to_receive(moved.block(number))
        return number, into, [irecv(each, group=self.group, group_src=source) for each in into.messages]

    def _gather_wanted(self, mine: list[int] | str) -> list[list[int]]:
        """Return the blocks that each rank wants, by rank.

        Raises:
            InvalidArgumentError, DistError: a rank cannot take the state; it says why in place of blocks.
        """
        told = gathered(self.group, mine)
        for rank, each in enumerate(told):
            if isinstance(each, str):
                kind = InvalidArgumentError if rank == self.group.rank() else DistError
                raise kind(
                    f"elastic.State: rank {rank} of group {self.group.group_name!r} cannot take over the"
                    f" state of the others: {each}. All ranks must build the same model and optimizer"
                )
        return told

    def _damaged(self, wanted: list[list[int]]) -> DistError:
        ranks = [rank for rank, blocks in enumerate(wanted) if blocks]
        return DistError(
            f"elastic.State: blocks of the state arrived with another checksum {_MAX_ROUNDS} times, on"
            f" {named(ranks)} of group {self.group.group_name!r}. Does something change the state while it is"
            " fetched, or is memory damaged?"
        )


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return memory to receive into; much of it in huge pages, as else page faults take most of the time."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.device.type == "cpu" and tensor.nbytes >= _HUGE_FROM_BYTES:
        prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def wait_for(works: list[Work | None]) -> None:
    """Wait for messages; on a rank that is not in the group, none has been begun."""
    for work in works:
        if work is not None:
            work.wait()


def _joined(told: list[dict[int, Any]]) -> dict[int, Any]:
    return {number: value for each in told for number, value in each.items()}
