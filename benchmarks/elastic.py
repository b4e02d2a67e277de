"""Time what elastic training costs: a step beside DistributedDataParallel, and moving a state to a new rank.

    python -m benchmarks.elastic [--ranks 2] [--megabytes 100] [--layers 8] [--width 1024]
    python -m benchmarks.elastic --agreement    # of 64 ranks that are threads, and 16 that are processes
    python -m benchmarks.elastic --link 1000    # the state goes over a link of so many Mbit/s; needs root

Prints one line for each. Ranks are processes; every number is the median of several repetitions on rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn

import torchestra as dist
from benchmarks.namespaces import Namespaces
from torchestra import elastic
from torchestra.nn.parallel import DistributedDataParallel

SHARDS, SAMPLES = 4, 16
_MEETING_SECONDS = 60.0
_AGREEING: tuple[tuple[Literal["threads", "processes"], int], ...] = (("threads", 64), ("processes", 16))


def network(layers: int, width: int) -> nn.Module:
    """Return layers of equal width."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def with_ddp(layers: int, width: int, steps: int) -> float:
    """Return the median seconds of a step; a rank's share is one batch."""
    model = DistributedDataParallel(network(layers, width), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(SAMPLES * SHARDS // dist.get_world_size(), width)
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def with_shards(layers: int, width: int, steps: int, shards: int) -> float:
    """Return the median seconds of a step, in which a rank computes some shards."""
    model = network(layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(SAMPLES * SHARDS // shards, width)
    stamps: dict[int, float] = {}
    for shard in elastic.shards(elastic.State(model, optimizer), steps, shards):
        stamps.setdefault(shard.step, time.perf_counter())
        shard.backward(model(inputs).square().mean(), len(inputs))
    times = [stamps[step] for step in sorted(stamps)]
    return statistics.median([after - before for before, after in itertools.pairwise(times[2:])])


class Moving(NamedTuple):
    """Hold what moving a state takes, in seconds.

    Attributes:
        new, behind: until a new rank, and one a step behind, has it.
        core: what a rank's core works for the first, which other programs on the machine do not change much.
        copied, copied_core: a copy of the state by one rank, into memory in use, while the others wait: the
            time, and what the core works.
        copied_anew: the same into new memory, which has page faults, as what a rank a step behind receives.
    """

    new: float
    behind: float
    core: float
    copied: float
    copied_core: float
    copied_anew: float


def moving(megabytes: int) -> Moving:
    """Measure how a state is moved."""
    tensors = {f"t{index}": torch.ones(megabytes << 16) for index in range(4)}
    target = torch.ones(megabytes << 16)
    began_anew, behind, core = [], [], []
    copies: list[tuple[float, float, float]] = []
    for repetition in range(4):
        state = elastic.State(*tensors.values())
        if dist.get_rank() != 1:
            state.load_state_dict(state.state_dict())
        dist.barrier()
        worked = time.process_time()
        began_anew.append(state.sync().seconds)
        core.append(time.process_time() - worked)
        state.step = repetition + (dist.get_rank() != 1)
        dist.barrier()
        behind.append(state.sync().seconds)
        if dist.get_rank() == 0:  # in turns with the others, as other programs may come and go
            copies.append((*copying(list(tensors.values()), [target] * 4), copying_anew(tensors)))
        dist.barrier()
    new, stale = statistics.median(began_anew[1:]), statistics.median(behind[1:])
    plain = [statistics.median(each) for each in zip(*copies[1:], strict=True)] or [0.0] * 3
    return Moving(new, stale, statistics.median(core[1:]), *plain)


def copying(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> tuple[float, float]:
    """Return how long a copy takes, and what its core works, in seconds."""
    began, worked = time.perf_counter(), time.process_time()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    return time.perf_counter() - began, time.process_time() - worked


def copying_anew(tensors: dict[str, torch.Tensor]) -> float:
    """Return how long a copy into new memory takes, in seconds."""
    return copying(list(tensors.values()), [torch.empty_like(each) for each in tensors.values()])[0]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return what this rank has measured, in seconds."""
    torch.set_num_threads(1)
    dist.init_process_group()
    found: dict[str, float] = {}
    ranks = dist.get_world_size()
    ways: dict[str, Callable[[], float]] = {
        "DistributedDataParallel": lambda: with_ddp(options.layers, options.width, options.steps),
        "as many shards as ranks": lambda: with_shards(options.layers, options.width, options.steps, ranks),
        f"{2 * ranks} shards": lambda: with_shards(options.layers, options.width, options.steps, 2 * ranks),
    }
    for name, way in ways.items():
        found[f"step with {name}"] = min(way() for _ in range(3))
    moved = moving(options.megabytes)
    found[f"{options.megabytes} MiB to a new rank"] = moved.new
    found[f"{options.megabytes} MiB to a new rank: work of each core"] = moved.core
    found[f"{options.megabytes} MiB to a rank that is a step behind"] = moved.behind
    found[f"{options.megabytes} MiB copied by one rank"] = moved.copied
    found[f"{options.megabytes} MiB copied by one rank: work of its core"] = moved.copied_core
    found[f"{options.megabytes} MiB copied by one rank into new memory"] = moved.copied_anew
    dist.destroy_process_group()
    return found


def agreement(repetitions: int) -> list[float]:
    """Return how long each call of shrink() took on this rank, after the last rank had left."""
    torch.set_num_threads(1)
    dist.init_process_group()
    took = []
    for _ in range(repetitions):
        group = dist.group.WORLD
        assert group is not None
        dist.barrier()
        if group.rank() == group.size() - 1:
            break
        with contextlib.suppress(dist.GroupAbortedError):
            while True:  # until it is gone
                dist.barrier()
        began = time.perf_counter()
        group.shrink()
        took.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return took


def slowest_agreement(kind: Literal["threads", "processes"], ranks: int, repetitions: int = 9) -> list[float]:
    """Return, for each time that a rank left, how long it took the slowest of the others to agree on it."""
    found = dist.launch(agreement, ranks, repetitions, kind=kind)
    return [max(times) for times in zip(*found[: ranks - repetitions], strict=True)]


def over_link(mbit: int, megabytes: int) -> None:
    """Print how long a state takes over a link between two namespaces, and its bare bytes."""
    environment = {**os.environ, "TORCHESTRA_SECRET": os.urandom(16).hex(), "OMP_NUM_THREADS": "1"}
    with Namespaces(2, mbit) as hosts:
        environment |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        program = [sys.executable, "-m", "benchmarks.elastic", "--worker", "--megabytes", str(megabytes)]
        ranks = [
            subprocess.Popen([*hosts.inside(rank), *program], env={**environment, "RANK": str(rank)})
            for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")
    print(f"of {mbit} Mbit/s the bare bytes take {megabytes * 8 * 1.048576 / mbit * 1e3:.0f} ms")


def be_host(megabytes: int) -> None:
    """Move a state to the other rank, which is on another host."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    tensors, took, core = [torch.empty(megabytes << 16) for _ in range(4)], [], []
    for _ in range(3):
        state = elastic.State(*(tensor.normal_() for tensor in tensors))  # what is alike would not be sent
        if dist.get_rank() == 0:
            state.load_state_dict(state.state_dict())
        dist.barrier()
        worked = time.process_time()
        took.append(state.sync().seconds)
        core.append(time.process_time() - worked)
    if dist.get_rank() == 0:
        name = f"{megabytes} MiB to a new rank"
        found = {name: min(took), f"{name}: work of the sender's core": min(core)}
        print("\n".join(lines(found)), flush=True)
    plain_s = by_plain_connection(megabytes)
    if dist.get_rank() == 0:
        print("\n".join(lines({f"{megabytes} MiB by one plain TCP connection": plain_s})), flush=True)
    dist.destroy_process_group()


def by_plain_connection(megabytes: int) -> float:
    """Send as many bytes from rank 0 to rank 1 by TCP alone; return, on both, how long rank 1 receives."""
    payload, port, took = bytearray(1 << 20), [0], [0.0]
    if dist.get_rank() == 0:
        with socket.create_server(("", 0)) as server:
            server.settimeout(_MEETING_SECONDS)
            port = [server.getsockname()[1]]
            dist.broadcast_object_list(port, 0)
            with server.accept()[0] as connection:
                for _ in range(megabytes):
                    connection.sendall(payload)
    else:
        dist.broadcast_object_list(port, 0)
        with socket.create_connection((os.environ["MASTER_ADDR"], port[0]), _MEETING_SECONDS) as connection:
            began, left = time.perf_counter(), megabytes << 20
            while left and (received := connection.recv_into(payload)):
                left -= received
            took = [time.perf_counter() - began]
    dist.broadcast_object_list(took, 1)
    return took[0]


def lines(found: dict[str, float]) -> Iterator[str]:
    """Return a line for each time."""
    for name, seconds in found.items():
        yield f"{name:55}{seconds * 1e3:9.2f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time what elastic training costs.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=100, help="of state to move")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--agreement", action="store_true", help="measure only how soon ranks agree")
    parser.add_argument("--link", type=int, metavar="MBIT", help="measure only the state over such a link")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        be_host(options.megabytes)
        return
    if options.link is not None:
        over_link(options.link, options.megabytes)
        return
    if options.agreement:
        for kind, ranks in _AGREEING:
            found = slowest_agreement(kind, ranks)
            name = f"{ranks} {kind} agree that one has left"
            print(f"{name:55}{statistics.median(found) * 1e3:9.2f} ms, at most {max(found) * 1e3:.2f}")
        return
    print("\n".join(lines(dist.launch(measure, options.ranks, options)[0])))


if __name__ == "__main__":
    main()
