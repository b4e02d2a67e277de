"""The soak on one rank: operations drawn at random, each checked against a formula.

All ranks draw the same plan from the seed, and so know what they must receive. Drawn for every operation:
its group (the default one and three others are used at once), size (none to several MB, at times 40 MB),
dtype, reduction, root, whether it is asynchronous; by each rank on its own: where its tensors lie (ordinary
or shared memory, contiguous or not).
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from soak_values import LARGEST, reduced, values

import torchestra as dist
from torchestra import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *FLOATS, *INTEGERS, *COMPLEX, torch.bool)
OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "messages",
    "from_any",
)
Check = Callable[[], None]
Begun = tuple[Any, Check]


class Soak:
    """One rank's way through the plan."""

    def __init__(self, seed: str, until: float) -> None:
        self.plan, self.until = random.Random(seed), until
        self.own = random.Random(f"{seed} {dist.get_rank()}")
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self.pending: list[tuple[Any, Callable[[], None]]] = []
        world = list(range(dist.get_world_size()))
        chosen = [self.plan.sample(world, self.plan.randint(1, len(world))) for _ in range(3)]
        self.groups = [dist.group.WORLD, dist.group.WORLD, *map(dist.new_group, chosen)]
        self.what = ""

    def run(self) -> None:
        """Rounds until the time is over on one rank."""
        over = torch.zeros(1)
        while not over.item():
            for _ in range(25):
                self.one()
            self.own.shuffle(self.pending)
            for work, check in self.pending:
                work.wait()
                check()
            self.pending.clear()
            dist.all_reduce(over.fill_(time.monotonic() > self.until), ReduceOp.MAX)

    def one(self) -> None:
        """The next operation of the plan, if this rank is in its group."""
        dice = random.Random(self.plan.getrandbits(60))
        group, name = dice.choice(self.groups), dice.choice(OPERATIONS)
        dtype, asynchronous = dice.choice(DTYPES), dice.random() < 0.5
        bound = dice.choice([0, 64, 64, 4096, 4096, 65_536, 65_536, 300_000, 1 << 20, 6 << 20])
        size_bytes = LARGEST if dice.random() < 0.004 else dice.randint(bound // 2, bound)
        length = size_bytes // dtype.itemsize
        if isinstance(group, dist.NonMember):
            return
        self.dice, self.group, self.asynchronous = dice, group, asynchronous
        self.rank, self.size = group.rank(), group.size()
        self.dtype, self.salt, self.root = dtype, dice.randrange(1000), dice.randrange(group.size())
        shown = "async " * asynchronous + f"{name} of {length} {dtype}"
        self.what = f"{shown} in {group.group_name!r} of {self.size}, rank {self.rank}, root {self.root}"
        self.counts[name + ", async" * asynchronous] += 1
        self.bytes += size_bytes
        work, check = getattr(self, name)(length)
        if work is None:
            check()
        else:
            self.pending.append((work, check))

    # -- tensors

    def tensor(self, content: torch.Tensor, flat: bool = False) -> torch.Tensor:
        """A tensor with this content, somewhere."""
        length, where = content.numel(), self.own.choice(["plain", "shared", "part", "strided", "turned"])
        allocate: Callable[..., torch.Tensor] = torch.empty
        if where == "shared" or self.own.random() < 0.3:
            allocate = functools.partial(dist.empty, group=self.group)
        shape, cut = {
            "part": (length + 5, slice(2, length + 2)),
            "strided": (2 * length, slice(0, None, 2)),
        }.get(where, (length, slice(None)))
        try:
            found = allocate(shape, dtype=self.dtype)
        except dist.InvalidArgumentError:  # the shared memory is full of what is pending
            found = torch.empty(shape, dtype=self.dtype)
        found = found[cut]
        if where == "turned" and length % 3 == 0 and not flat:
            found = found.view(length // 3, 3).t()
        return found.copy_(content.view(found.shape))

    def holding(self, rank: int, salt: int, length: int) -> torch.Tensor:
        return self.tensor(values(rank, salt, length, self.dtype))

    def blank(self, length: int, flat: bool = False) -> torch.Tensor:
        return self.tensor(torch.ones(length, dtype=self.dtype), flat)

    def expect(
        self, found: Sequence[torch.Tensor], wanted: Callable[[], Sequence[torch.Tensor]]
    ) -> Callable[[], None]:
        """Return what compares the results, now or when the operation is done."""
        what = self.what

        def check() -> None:
            for number, (one, other) in enumerate(zip(found, wanted(), strict=True)):
                flat = one.reshape(-1)
                if not torch.equal(flat, other):
                    wrong = (flat != other).nonzero().flatten()
                    at = int(wrong[0])
                    raise AssertionError(
                        f"{what}: tensor {number}: {len(wrong)} of {len(flat)} elements are wrong, from {at}"
                        f" to {int(wrong[-1])}: {flat[at]} instead of {other[at]}"
                    )

        return check

    def pieces(
        self, salts: Sequence[int], ranks: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[], list[torch.Tensor]]:
        """Return what compares with pieces that ranks have sent."""
        dtype = self.dtype
        return lambda: [values(r, s, n, dtype) for r, s, n in zip(ranks, salts, lengths, strict=True)]

    # -- operations: each begins one, and gives its work (None if it is done) and what checks the result

    def drawn(self) -> tuple[ReduceOp, int, int, int, torch.dtype]:
        """A reduction that the dtype has, and what checks must remember for later."""
        names = ["SUM", "AVG"]
        if self.dtype == torch.bool:
            names = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
        elif not self.dtype.is_complex:
            names += ["PRODUCT", "MIN", "MAX"]
            names += ["PREMUL_SUM"] if self.dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
        name = self.dice.choice(names)
        self.what += f", {name}"
        op = ReduceOp.premul_sum(0.5) if name == "PREMUL_SUM" else ReduceOp(name)
        return op, self.size, self.rank, self.salt, self.dtype

    def sent(self, salt: int, length: int, op: ReduceOp) -> torch.Tensor:
        return self.tensor(values(self.rank, salt, length, self.dtype, small=op.name == "PRODUCT"))

    def all_reduce(self, length: int) -> Begun:
        op, size, _, salt, dtype = self.drawn()
        tensor = self.sent(salt, length, op)
        work = dist.all_reduce(tensor, op, self.group, self.asynchronous)
        return work, self.expect([tensor], lambda: [reduced(size, salt, length, dtype, op)])

    def reduce(self, length: int) -> Begun:
        op, size, rank, salt, dtype = self.drawn()
        tensor, at_root, small = self.sent(salt, length, op), rank == self.root, op.name == "PRODUCT"
        work = dist.reduce(tensor, None, op, self.group, self.asynchronous, group_dst=self.root)

        def wanted() -> list[torch.Tensor]:
            whole = (
                reduced(size, salt, length, dtype, op)
                if at_root
                else values(rank, salt, length, dtype, small)
            )
            return [whole]

        return work, self.expect([tensor], wanted)

    def reduce_scatter(self, length: int) -> Begun:
        op, size, rank, salt, dtype = self.drawn()
        lengths = [length // size // self.dice.randint(1, 3) for _ in range(size)]
        sources = [self.sent(salt + peer, each, op) for peer, each in enumerate(lengths)]
        output = self.blank(lengths[rank])
        work = dist.reduce_scatter(output, sources, op, self.group, self.asynchronous)
        return work, self.expect([output], lambda: [reduced(size, salt + rank, lengths[rank], dtype, op)])

    def reduce_scatter_tensor(self, length: int) -> Begun:
        op, size, rank, salt, dtype = self.drawn()
        part = length // size
        source, output = self.sent(salt, part * size, op), self.blank(part)
        if self.own.random() < 0.3 and source.is_contiguous():
            output = source.view(-1)[rank * part : (rank + 1) * part]  # in place
        work = dist.reduce_scatter_tensor(output, source, op, self.group, self.asynchronous)
        piece = slice(rank * part, (rank + 1) * part)
        return work, self.expect([output], lambda: [reduced(size, salt, part * size, dtype, op)[piece]])

    def broadcast(self, length: int) -> Begun:
        tensor = self.holding(self.rank, self.salt, length)
        source = self.group.to_global_rank(self.root)
        work = dist.broadcast(tensor, source, self.group, self.asynchronous)
        return work, self.expect([tensor], self.pieces([self.salt], [self.root], [length]))

    def all_gather(self, length: int) -> Begun:
        lengths = [length // self.size // self.dice.randint(1, 3) for _ in range(self.size)]
        source = self.holding(self.rank, self.salt, lengths[self.rank])
        outputs = [self.blank(each) for each in lengths]
        if self.own.random() < 0.3:
            outputs[self.rank] = source  # in place
        work = dist.all_gather(outputs, source, self.group, self.asynchronous)
        return work, self.expect(outputs, self.pieces([self.salt] * self.size, range(self.size), lengths))

    def all_gather_into_tensor(self, length: int) -> Begun:
        part = length // self.size
        source, output = self.holding(self.rank, self.salt, part), self.blank(part * self.size)
        work = dist.all_gather_into_tensor(output, source, self.group, self.asynchronous)
        wanted = self.pieces([self.salt] * self.size, range(self.size), [part] * self.size)
        return work, self.expect([output], lambda: [torch.cat(wanted())])

    def gather(self, length: int) -> Begun:
        part = length // self.size
        source = self.holding(self.rank, self.salt, part)
        outputs = [self.blank(part) for _ in range(self.size)] if self.rank == self.root else []
        work = dist.gather(source, outputs or None, None, self.group, self.asynchronous, group_dst=self.root)
        count = len(outputs)
        return work, self.expect(outputs, self.pieces([self.salt] * count, range(count), [part] * count))

    def scatter(self, length: int) -> Begun:
        part, output = length // self.size, self.blank(length // self.size)
        sources = [self.holding(self.root, self.salt + peer, part) for peer in range(self.size)]
        mine = sources if self.rank == self.root else None
        work = dist.scatter(output, mine, None, self.group, self.asynchronous, group_src=self.root)
        return work, self.expect([output], self.pieces([self.salt + self.rank], [self.root], [part]))

    def all_to_all(self, length: int) -> Begun:
        salts, sends, receives = self.exchanged(length)
        sources = [self.holding(self.rank, self.salt + peer, each) for peer, each in enumerate(sends)]
        outputs = [self.blank(each) for each in receives]
        work = dist.all_to_all(outputs, sources, self.group, self.asynchronous)
        return work, self.expect(outputs, self.pieces(salts, range(self.size), receives))

    def all_to_all_single(self, length: int) -> Begun:
        uneven = self.dice.random() < 0.5
        salts, sends, receives = self.exchanged(length, uneven)
        content = [values(self.rank, self.salt + peer, each, self.dtype) for peer, each in enumerate(sends)]
        source, output = self.tensor(torch.cat(content), flat=True), self.blank(sum(receives), flat=True)
        splits = (receives, sends) if uneven else (None, None)
        work = dist.all_to_all_single(output, source, *splits, self.group, self.asynchronous)
        wanted = self.pieces(salts, range(self.size), receives)
        return work, self.expect([output], lambda: [torch.cat(wanted())])

    def exchanged(self, length: int, uneven: bool = True) -> tuple[list[int], list[int], list[int]]:
        """Of an exchange: the salts of what this rank receives, the lengths that it sends and receives."""
        part = length // self.size
        table = [
            [part // self.dice.randint(1, 4) if uneven else part for _ in range(self.size)]
            for _ in range(self.size)
        ]
        return [self.salt + self.rank] * self.size, table[self.rank], [row[self.rank] for row in table]

    def barrier(self, length: int) -> Begun:
        return dist.barrier(self.group, self.asynchronous), lambda: None

    def messages(self, length: int) -> Begun:
        """Up to eight messages between random pairs; those of one pair and tag keep their order."""
        for number in range(self.dice.randint(1, 8) if self.size > 1 else 0):
            sender, receiver = self.dice.sample(range(self.size), 2)
            tag, each = self.dice.randrange(3), length // self.dice.randint(1, 8)
            if self.rank == sender:
                tensor = self.holding(sender, self.salt + number, each)
                self.begin(dist.isend, dist.send, tensor, receiver, tag, self.expect([], list))
            if self.rank == receiver:
                tensor = self.blank(each)
                wanted = self.pieces([self.salt + number], [sender], [each])
                self.begin(dist.irecv, dist.recv, tensor, sender, tag, self.expect([tensor], wanted))
        return None, lambda: None

    def begin(self, later: Any, now: Any, tensor: torch.Tensor, peer: int, tag: int, check: Check) -> None:
        """Send or receive, or begin to."""
        peer = self.group.to_global_rank(peer)
        if self.asynchronous:
            self.pending.append((later(tensor, peer, self.group, tag), check))
        else:
            now(tensor, peer, self.group, tag)
            check()

    def from_any(self, length: int) -> Begun:
        """One rank receives from all others, whoever comes first."""
        tag, part = 10 + self.dice.randrange(1 << 20), length // self.size
        if self.rank != self.root:
            tensor = self.holding(self.rank, self.salt, part)
            self.begin(dist.isend, dist.send, tensor, self.root, tag, self.expect([], list))
            return None, lambda: None
        tensors = [self.blank(part) for _ in range(self.size - 1)]
        if self.asynchronous:
            works = [dist.irecv(tensor, None, self.group, tag) for tensor in tensors]
            for work in works:
                work.wait()
            sources = [work.source_rank() for work in works]
        else:
            sources = [
                self.group.to_group_rank(dist.recv(tensor, None, self.group, tag)) for tensor in tensors
            ]
        assert sorted([*sources, self.root]) == list(range(self.size)), f"{self.what}: from {sources}"
        return None, self.expect(
            tensors, self.pieces([self.salt] * len(sources), sources, [part] * len(sources))
        )
