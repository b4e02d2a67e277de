"""What ranks work at: each workload repeats its operations until the time is over, and checks all results."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from tools.chaos.rounds import Round
from torch import nn

import torchestra as dist
from torchestra import rpc
from torchestra.engine.operations import COLLECTIVES
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.store import PrefixStore

TRAINING_STEPS = 40
_TRAINING_STEP_S = 0.03
_LENGTHS = (0, 1, 7, 1000, 30_001, 300_001)
_AT_ONCE = 8  # remote calls


class Job:
    """What a workload knows of its rank, and tells of it.

    Attributes:
        doing: the operation that it is in.
        steps: how often it has gone round.
        digests: of the parameters after each step of a training.
        store: where the ranks have met.
    """

    def __init__(self, round_: Round, rank: int, tell: Callable[..., None]) -> None:
        self.round, self.rank, self.size = round_, rank, round_.world.size
        self.doing, self.steps = "", 0
        self.digests: list[str] = []
        self.store: Any = None
        self.dice = random.Random(round_.seed)  # the same on all ranks
        self.until = time.monotonic() + round_.work_s
        self._tell = tell

    def stepped(self) -> None:
        """Count a step, and tell of the first."""
        if self.steps == 0:
            self.until = time.monotonic() + self.round.work_s
            self._tell("working")
        self.steps += 1

    def all_over(self) -> bool:
        """Return whether the time is over on any rank. All ranks must call this."""
        self.doing = "all_reduce"
        over = torch.tensor([float(time.monotonic() > self.until)])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return bool(over.item())


def expect(doing: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare a result."""
    if not torch.equal(found, wanted):
        wrong = (found != wanted).nonzero().flatten()
        raise AssertionError(
            f"{doing}: {len(wrong)} of {found.numel()} elements are wrong, the first is"
            f" {found[wrong[0]]} instead of {wanted[wrong[0]]}"
        )


class Values:
    """What ranks send: small integers that differ by sender, receiver and place.

    Args:
        length: of each piece.
    """

    def __init__(self, size: int, length: int) -> None:
        self.size, self._base = size, torch.arange(length, dtype=torch.float32) % 7

    def of(self, sender: int, receiver: int = 0) -> torch.Tensor:
        """Return what one rank sends to one other, or to all."""
        return self._base + sender + 3 * receiver

    def row(self, sender: int) -> list[torch.Tensor]:
        """Return what a rank sends to each."""
        return [self.of(sender, receiver) for receiver in range(self.size)]

    def column(self, receiver: int) -> list[torch.Tensor]:
        """Return what a rank receives from each."""
        return [self.of(sender, receiver) for sender in range(self.size)]

    def total(self, senders: int, receiver: int = 0) -> torch.Tensor:
        """Return the sum of what the first so many ranks send."""
        return sum((self.of(sender, receiver) for sender in range(senders)), torch.zeros_like(self._base))


def collectives(job: Job) -> None:
    """Run every collective of the table, in a random order, with pieces of random length."""
    while True:
        calls = _calls(job.rank, job.size, Values(job.size, job.dice.choice(_LENGTHS)), job.dice)
        names = list(COLLECTIVES)
        job.dice.shuffle(names)
        for name in names:
            job.doing = name
            found, wanted = calls[name]()
            expect(name, found, wanted)
        job.stepped()
        if job.all_over():
            return


def _calls(
    rank: int, size: int, values: Values, dice: random.Random
) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Return, for each collective, what calls it and returns what was found and what is right."""
    root, own, total = dice.randrange(size), values.of(rank), values.total(size)
    alone = [values.of(sender) for sender in range(size)]

    def in_place(call: Callable[..., Any], wanted: torch.Tensor, *args: Any) -> Any:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            tensor = own.clone()
            call(tensor, *args)
            return tensor, wanted

        return run

    def into_list(call: Callable[..., Any], wanted: list[torch.Tensor], *args: Any) -> Any:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            outputs = [torch.empty_like(each) for each in wanted]
            call(outputs or None, *args)
            return torch.cat([own, *outputs]), torch.cat([own, *wanted])

        return run

    def into(call: Callable[..., Any], wanted: torch.Tensor, *args: Any) -> Any:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            output = torch.empty_like(wanted)
            call(output, *args)
            return output, wanted

        return run

    def barrier() -> tuple[torch.Tensor, torch.Tensor]:
        dist.barrier()
        return own, own

    mine, row = values.total(size, rank), values.row(rank)
    at_root_only = alone if rank == root else []
    return {
        "all_reduce": in_place(dist.all_reduce, total),
        "reduce": in_place(dist.reduce, total if rank == root else own, root),
        "broadcast": in_place(dist.broadcast, values.of(root), root),
        "scan": in_place(dist.scan, values.total(rank + 1)),
        "exscan": in_place(dist.exscan, values.total(rank) if rank else own),
        "all_gather": into_list(dist.all_gather, alone, own),
        "all_gather_into_tensor": into(dist.all_gather_into_tensor, torch.cat(alone), own),
        "gather": into_list(lambda out, tensor: dist.gather(tensor, out, root), at_root_only, own),
        "scatter": into(
            lambda out: dist.scatter(out, values.row(root) if rank == root else None, root),
            values.of(root, rank),
        ),
        "reduce_scatter": into(dist.reduce_scatter, mine, row),
        "reduce_scatter_tensor": into(dist.reduce_scatter_tensor, mine, torch.cat(row)),
        "all_to_all": into_list(dist.all_to_all, values.column(rank), row),
        "all_to_all_single": into(dist.all_to_all_single, torch.cat(values.column(rank)), torch.cat(row)),
        "barrier": barrier,
    }


def persistent(job: Job) -> None:
    """Start persistent collectives and messages again and again."""
    rank, size = job.rank, job.size
    values = Values(size, job.dice.choice(_LENGTHS[1:]))
    after, before = (rank + 1) % size, (rank - 1) % size
    reduced, gathered = values.of(rank), torch.cat([values.of(0)] * size)
    exchanged, received = torch.empty_like(gathered), torch.empty_like(reduced)
    row, own = torch.cat(values.row(rank)), values.of(rank)
    plans = {
        "all_reduce": dist.all_reduce_init(reduced),
        "all_gather_into_tensor": dist.all_gather_into_tensor_init(gathered, own),
        "all_to_all_single": dist.all_to_all_single_init(exchanged, row),
        "recv": dist.recv_init(received, before),
        "send": dist.send_init(own, after),
    }
    while True:
        reduced.copy_(own)
        gathered.zero_()
        exchanged.zero_()
        received.zero_()
        for name, plan in plans.items():
            job.doing = name
            plan.start()
        for name, plan in plans.items():
            job.doing = name
            plan.wait()
        expect("all_reduce", reduced, values.total(size))
        expect("all_gather_into_tensor", gathered, torch.cat([values.of(each) for each in range(size)]))
        expect("all_to_all_single", exchanged, torch.cat(values.column(rank)))
        expect("recv", received, values.of(before))
        job.stepped()
        if job.all_over():
            return


def messages(job: Job) -> None:
    """Send to and receive from every other rank, waiting and not."""
    rank, size = job.rank, job.size
    others = [each for each in range(size) if each != rank]
    while True:
        values = Values(size, job.dice.choice(_LENGTHS))
        received = {each: torch.empty_like(values.of(0)) for each in others}
        works = []
        for each in others:
            job.doing = "send"
            works.append(dist.isend(values.of(rank, each), each, tag=1))
            works.append(dist.irecv(received[each], each, tag=1))
        for work in works:
            job.doing = "send or recv"
            work.wait()
        for each in others:
            expect(f"recv from {each}", received[each], values.of(each, rank))
        own, found = values.of(rank), torch.empty_like(values.of(0))
        order = ((dist.send, own, (rank + 1) % size), (dist.recv, found, (rank - 1) % size))
        for call, tensor, peer in order if rank else reversed(order):
            job.doing = call.__name__
            call(tensor, peer)
        expect("recv from the rank before", found, values.of((rank - 1) % size))
        job.stepped()
        if job.all_over():
            return


class Account:
    """A value that references refer to."""

    def __init__(self, start: torch.Tensor) -> None:
        self.total = start

    def add(self, more: torch.Tensor) -> torch.Tensor:
        """Add to it; what it is then."""
        self.total = self.total + more
        return self.total


def twice(value: Any) -> Any:
    """Answer a call."""
    return value + value


def passed_on(account: Any, more: torch.Tensor) -> torch.Tensor:
    """Use a reference that somebody else has made."""
    return account.rpc_sync().add(more)


def remote_calls(job: Job) -> None:
    """Call others, with tensors and references."""
    options = rpc.RpcBackendOptions(
        store=PrefixStore("rpc", job.store),
        rpc_timeout=30.0,
        heartbeat_timeout=job.round.heartbeat_s,
    )
    job.doing = "init_rpc"
    rpc.init_rpc(f"worker{job.rank}", rank=job.rank, world_size=job.size, rpc_backend_options=options)
    try:
        dice = random.Random(f"{job.round.seed}:{job.rank}")
        while time.monotonic() < job.until:
            values = Values(job.size, dice.choice(_LENGTHS))
            peer, third = (f"worker{dice.randrange(job.size)}" for _ in range(2))
            own, limit = values.of(job.rank), job.round.timeout_s
            job.doing = "rpc_sync"
            expect("rpc_sync", rpc.rpc_sync(peer, twice, (own,), timeout=limit), own + own)
            job.doing = "rpc_async"
            futures = [rpc.rpc_async(peer, twice, (each,), timeout=limit) for each in range(_AT_ONCE)]
            assert [future.wait() for future in futures] == [2 * each for each in range(_AT_ONCE)]
            job.doing = "remote"
            account = rpc.remote(peer, Account, (own,), timeout=limit)
            expect("a reference", rpc.rpc_sync(third, passed_on, (account, own), timeout=limit), own + own)
            expect("to_here", account.to_here(timeout=limit).total, own + own)
            del account
            job.stepped()
        job.doing = "shutdown"
        rpc.shutdown(timeout=2 * job.round.timeout_s + job.round.heartbeat_s)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise


def training(job: Job) -> None:
    """Train a small network with DistributedDataParallel, and note its parameters after every step."""
    dice = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * 0.1)
    job.doing = "DistributedDataParallel"
    network, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters(), lr=1e-3)
    mine = torch.Generator().manual_seed(100 + job.rank)
    for _ in range(TRAINING_STEPS):
        inputs, targets = torch.randn(8, 16, generator=mine), torch.randn(8, 4, generator=mine)
        optimizer.zero_grad()
        loss = (network(inputs) - targets).square().mean()
        job.doing = "all_reduce"
        loss.backward()
        optimizer.step()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        job.digests.append(digest.hexdigest()[:16])
        job.stepped()
        time.sleep(_TRAINING_STEP_S)


def import_all() -> None:
    """Import what workloads need only when they run, for processes that are forked from this one."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.sum().backward()
    torch.optim.Adam([parameter]).step()


WORKLOADS: dict[str, Callable[[Job], None]] = {
    "collectives": collectives,
    "persistent": persistent,
    "messages": messages,
    "rpc": remote_calls,
    "training": training,
}
"""All workloads by name."""
