"""Compare a group on several hosts with plain Gloo and plain MPI over all ranks: `make bench-hosts`.

Two hosts are network namespaces with two ranks each, joined by a cable (veth) that `tc tbf` shapes to the
given rate in both directions. Every rank is in a group of torchestra's and in one of torch.distributed's, and
the two take turns, so that whatever else the machine does hits both. The report shows the median over the
rounds of the slowest rank's time, and the range of the middle half of the rounds. torchestra's group uses its
default between the hosts, whose connections are encrypted; another one, which takes its turns too, trusts the
network and uses Gloo there. Where MPICH and mpi4py are beside the interpreter, its mpiexec starts the ranks,
and two more take their turns: a group of torchestra's that uses MPI between the hosts, and MPI itself, over
all ranks.

The bound is the time that the link needs for what has to cross it in one direction, with the headers that go
with each 1448 bytes of a TCP segment (66 bytes of Ethernet, IP and TCP). Of H hosts with R / H ranks each, a
host has to receive at least, of a tensor of N bytes:

    all_reduce      2 (H - 1) / H N    for two hosts N: the sum of the other's, which it knows nothing of
    all_gather      (H - 1) / H N      the other hosts' parts; N is the whole result
    reduce_scatter  (H - 1) / H N      the others' sums of what its ranks get; N is each rank's input
    broadcast       N                  on every host but the root's
    all_to_all      (H - 1) / H R / H N    from each rank of other hosts 1 / R of its N for each rank here
    DDP             as all_reduce      of all gradients; and what a step takes while nothing can be sent:
                                       forward, the last layer's part of backward, and the optimizer, as
                                       measured in turns with the rest

Plain Gloo's all_reduce goes round a ring of all ranks, two of whose edges cross between the two hosts, one in
each direction, with 2 (R - 1) / R N bytes each: 1.5 times the bound. So over a link that Gloo keeps busy an
all_reduce cannot be more than 1.5 times faster, and a step of DDP less, of which a part is the same for both.

Needs Linux, root, iproute2 and a kernel with veth and tbf.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RANKS, HOSTS = 4, 2
ADDRESS, PORT, STORE_PORT = "10.78.0.{}", 29611, 29612
SEGMENT, HEADERS = 1448, 66
KB, MB = 1 << 10, 1 << 20
SIZES = {"4 KB": 4 * KB, "64 KB": 64 * KB, "256 KB": 256 * KB, "1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB}
CASES = (
    *(f"all_reduce {size}" for size in SIZES),
    "all_gather 16 MB",
    "reduce_scatter 16 MB",
    "broadcast 16 MB",
    "all_to_all 16 MB",
    "ping 4 KB",
    "ping 1 MB",
    "ping 16 MB",
    "DDP step",
)
ROUNDS = {"4 KB": 200, "64 KB": 60, "256 KB": 40, "1 MB": 20, "16 MB": 9, "64 MB": 5, "step": 11}
PEERS = {"ours": "torchestra", "gloo": "Gloo", "ours_gloo": "on Gloo", "ours_mpi": "on MPI", "mpi": "MPI"}
MPIEXEC = Path(sys.executable).with_name("mpiexec")
WIDTHS = (1024, 2048, 2048, 1024)
GRADIENTS = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))


def run(*words: str) -> None:
    """Run a program that must succeed."""
    subprocess.run(words, check=True)


def make_network(names: list[str], rate: str) -> None:
    """Make the hosts and the link."""
    for name in names:
        run("ip", "netns", "add", name)
    first, second = names
    run(*f"ip -n {first} link add eth0 type veth peer name eth0 netns {second}".split())
    for host, name in enumerate(names):
        run(*f"ip -n {name} address add {ADDRESS.format(host + 1)}/24 dev eth0".split())
        for device in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", device, "up")
        shape = f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst 128kb latency 100ms"
        run(*shape.split())


def main() -> None:
    """Start the ranks and print rank 0's output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=1000, help="the link's rate, in Mbit/s, default 1000")
    parser.add_argument("--only", choices=CASES, action="append", help="measure only this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.only or list(CASES))
        return
    # So that the hosts are removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = [f"tqbench{os.getpid()}h{host}" for host in range(HOSTS)]
    with tempfile.TemporaryDirectory() as directory:
        workers: list[subprocess.Popen[str]] = []
        try:
            make_network(names, f"{options.mbit}mbit")
            workers += start(names, Path(directory))
            output = workers[0].stdout
            assert output is not None
            print(f"{HOSTS} hosts x {RANKS // HOSTS} ranks, {options.mbit} Mbit/s, float32; ms", flush=True)
            ours, gloo, *others = PEERS.values()
            header = f"{'':>20} {ours:>24} {gloo:>24} {'faster':>7} {'bound':>8} {'of bound':>9}"
            print(header, *(f"{each:>9}" for each in others), flush=True)
            for line in output:
                if line.startswith("{"):
                    report(json.loads(line), options.mbit)
            codes = [worker.wait() for worker in workers]
            if any(codes):
                sys.exit(f"the ranks ended with {codes}")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def start(names: list[str], directory: Path) -> list[subprocess.Popen[str]]:
    """Start the ranks; the output of rank 0 is that of the first process."""
    environment = {**os.environ, "TORCHESTRA_SECRET": os.urandom(16).hex(), "GLOO_SOCKET_IFNAME": "eth0"}
    # UCX, which MPICH uses, would find that both hosts have one memory.
    environment |= {"OMP_NUM_THREADS": "1", "TORCHESTRA_BRIDGE": "curve", "UCX_TLS": "tcp,self"}
    program = [sys.executable, *sys.argv, "--worker"]
    if has_mpich():
        shell = directory / "remote-shell"  # used in place of ssh
        hosts = {ADDRESS.format(host + 1): name for host, name in enumerate(names)}
        cases = "".join(f"{address}) name={name};;\n" for address, name in hosts.items())
        shell.write_text(f'#!/bin/sh\ncase $1 in\n{cases}esac\nshift\nexec ip netns exec $name sh -c "$*"\n')
        shell.chmod(0o700)
        listed = ",".join(f"{address}:{RANKS // HOSTS}" for address in hosts)
        options = ["-launcher", "rsh", "-launcher-exec", str(shell), "-hosts", listed, "-n", str(RANKS)]
        commands = [["ip", "netns", "exec", names[0], str(MPIEXEC), *options, *program]]
    else:
        places = [names[rank * HOSTS // RANKS] for rank in range(RANKS)]
        commands = [
            ["ip", "netns", "exec", place, "env", f"PMI_RANK={rank}", *program]
            for rank, place in enumerate(places)
        ]
    return [
        subprocess.Popen(command, env=environment, stdout=None if number else subprocess.PIPE, text=True)
        for number, command in enumerate(commands)
    ]


def has_mpich() -> bool:
    """Return whether MPICH and mpi4py are beside the interpreter."""
    return MPIEXEC.with_name("mpichversion").exists() and find_spec("mpi4py") is not None


def bound(name: str, mbit: int) -> float:
    """Return the bound in seconds; see above."""
    kind, _, size = name.partition(" ")
    elsewhere, here = (HOSTS - 1) / HOSTS, RANKS // HOSTS
    shares = {
        "all_reduce": 2 * elsewhere,
        "DDP": 2 * elsewhere,
        "broadcast": 1.0,
        "all_to_all": elsewhere * here,
    }
    crossing = shares.get(kind, elsewhere) * (GRADIENTS if kind == "DDP" else SIZES[size])
    if kind == "ping":
        crossing = 2 * SIZES[size]  # there and back
    return crossing * (SEGMENT + HEADERS) / SEGMENT * 8 / (mbit * 1e6)


def report(found: dict[str, Any], mbit: int) -> None:
    """Return a line of the table."""
    columns, medians = [], []
    for which in ("ours", "gloo"):
        low, middle, high = (each * 1e3 for each in statistics.quantiles(found[which], n=4))
        columns.append(f"{middle:8.2f} ({low:.2f}-{high:.2f})")
        medians.append(middle)
    least = (bound(found["what"], mbit) + statistics.median(found.get("alone", [0.0]))) * 1e3
    ours, theirs = medians
    line = f"{found['what']:>20} {columns[0]:>24} {columns[1]:>24} {theirs / ours:7.2f} {least:8.2f}"
    others = (f"{statistics.median(found[which]) * 1e3:9.2f}" for which in list(PEERS)[2:] if which in found)
    print(line, f"{ours / least:9.2f}", *others, flush=True)


def work(wanted: list[str]) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as theirs

    import torchestra as ours

    rank = int(os.environ["PMI_RANK"])
    torch.set_num_threads(1)
    theirs.init_process_group("gloo", f"tcp://{ADDRESS.format(1)}:{PORT}", rank=rank, world_size=RANKS)
    ours.init_process_group(
        init_method=f"tcp://{ADDRESS.format(1)}:{STORE_PORT}", rank=rank, world_size=RANKS
    )
    peers: dict[str, tuple[Any, Any]] = {"ours": (ours, None), "gloo": (theirs, None)}
    os.environ |= {"TORCHESTRA_TRUST_NETWORK": "1", "TORCHESTRA_BRIDGE": "gloo"}
    peers["ours_gloo"] = ours, ours.new_group()
    if has_mpich():
        os.environ["TORCHESTRA_BRIDGE"] = "mpi"
        peers |= {"ours_mpi": (ours, ours.new_group()), "mpi": (Mpi(), None)}
    for name in wanted:
        operations = {which: operation(*peer, name, rank) for which, peer in peers.items()}
        if name == "DDP step":
            operations["alone"] = what_comes_before_and_after()
        told = compare(name, operations, ROUNDS[name.partition(" ")[2]])
        if rank == 0:
            print(json.dumps(told), flush=True)
    ours.barrier()
    ours.destroy_process_group()
    theirs.destroy_process_group()


class Mpi:
    """MPI's own calls, by the names that torch.distributed has for the same."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._in_place, self._world = MPI.IN_PLACE, MPI.COMM_WORLD

    def all_reduce(self, tensor: Any) -> None:
        self._world.Allreduce(self._in_place, tensor.numpy())

    def all_gather_into_tensor(self, output: Any, tensor: Any) -> None:
        self._world.Allgather(tensor.numpy(), output.numpy())

    def reduce_scatter_tensor(self, output: Any, tensor: Any) -> None:
        self._world.Reduce_scatter_block(tensor.numpy(), output.numpy())

    def broadcast(self, tensor: Any, root: int) -> None:
        self._world.Bcast(tensor.numpy(), root)

    def all_to_all_single(self, output: Any, tensor: Any) -> None:
        self._world.Alltoall(tensor.numpy(), output.numpy())

    def send(self, tensor: Any, rank: int) -> None:
        self._world.Send(tensor.numpy(), rank)

    def recv(self, tensor: Any, rank: int) -> None:
        self._world.Recv(tensor.numpy(), rank)


def operation(package: Any, group: Any, name: str, rank: int) -> Callable[[], object] | None:
    """Return the operation of a package to measure, on a group or all ranks; None if it has none."""
    import torch

    kind, _, size = name.partition(" ")
    if kind == "DDP":
        return None if isinstance(package, Mpi) else training_step(package, group)
    count = SIZES[size] // 4
    whole, other, part = torch.zeros(count), torch.zeros(count), torch.zeros(count // RANKS)
    chosen = {"group": group} if group is not None else {}
    if kind == "ping":
        return partial(ping, package, whole, rank, chosen)
    return {
        "all_reduce": partial(package.all_reduce, whole, **chosen),
        "all_gather": partial(package.all_gather_into_tensor, whole, part, **chosen),
        "reduce_scatter": partial(package.reduce_scatter_tensor, part, whole, **chosen),
        "broadcast": partial(package.broadcast, whole, 0, **chosen),
        "all_to_all": partial(package.all_to_all_single, other, whole, **chosen),
    }[kind]


def ping(package: Any, tensor: Any, rank: int, chosen: dict[str, Any]) -> None:
    """Send a message from the first rank to the last, on the other host, and one back."""
    first, last = 0, RANKS - 1
    if rank == first:
        package.send(tensor, last, **chosen)
        package.recv(tensor, last, **chosen)
    elif rank == last:
        package.recv(tensor, first, **chosen)
        package.send(tensor, first, **chosen)


def compare(name: str, operations: dict[str, Callable[[], object] | None], rounds: int) -> dict[str, Any]:
    """Return the seconds of each in turn, after two rounds that do not count."""
    calls = {which: call for which, call in operations.items() if call is not None}
    times: dict[str, list[float]] = {which: [] for which in calls}
    for number in range(rounds + 2):
        for which, call in calls.items():
            seconds = slowest(call)
            if number >= 2:
                times[which].append(seconds)
    return {"what": name, **times}


def slowest(operation: Callable[[], object]) -> float:
    """Return the seconds until all ranks, starting together, have run an operation."""
    import torch

    import torchestra as ours

    ours.barrier()
    started = time.perf_counter()
    operation()
    found = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    ours.all_reduce(found, ours.ReduceOp.MAX)
    return found.item()


def make_model() -> Any:
    """Return the MLP."""
    from torch import nn

    layers = [each for pair in itertools.pairwise(WIDTHS) for each in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_inputs() -> Any:
    """Return a batch."""
    import torch

    return torch.randn(32, WIDTHS[0])


def optimize(model: Any) -> None:
    """Take a step of plain gradient descent."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad


def training_step(package: Any, group: Any) -> Callable[[], object]:
    """Return a step of an MLP under the package's DistributedDataParallel."""
    from torch import nn

    import torchestra as ours

    parallel = ours.nn.parallel if package is ours else nn.parallel
    model, inputs = parallel.DistributedDataParallel(make_model(), process_group=group), make_inputs()

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()
        optimize(model)

    return step


class EnoughError(Exception):
    """Ends a backward."""


def what_comes_before_and_after() -> Callable[[], object]:
    """Return a step of the MLP alone, whose backward ends when the first large gradient is there."""
    model, inputs = make_model(), make_inputs()
    model(inputs).sum().backward()

    def end(_: Any) -> None:
        raise EnoughError

    model[-1].weight.register_post_accumulate_grad_hook(end)

    def step() -> None:
        with contextlib.suppress(EnoughError):
            model(inputs).sum().backward()
        optimize(model)

    return step


if __name__ == "__main__":
    main()
