"""What a group on several hosts costs, beside plain Gloo over all ranks: `make bench-hosts`.

Two hosts are network namespaces with two ranks each, joined by a cable (veth) that `tc tbf` shapes to the
given rate in both directions. Every rank is in a group of torchestra's and in one of torch.distributed's, and
the two take turns, so that whatever else the machine does hits both. Told are medians over the rounds of the
slowest rank's time.

The bound: an all_reduce of N bytes over H hosts has every host send, and receive, at least 2 (H - 1) / H N
bytes (each host's sum has to leave it for every place where it is added up, and the whole sum has to come
back); at the link's rate, and with the headers that go with each 1448 bytes of a TCP segment (66 bytes of
Ethernet, IP and TCP).

Needs Linux, root, iproute2 and a kernel with veth and tbf.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

RANKS, HOSTS = 4, 2
ADDRESS, PORT, STORE_PORT = "10.78.0.{}", 29611, 29612
SEGMENT, HEADERS = 1448, 66
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
ROUNDS = {"4 KB": 200, "64 KB": 60, "1 MB": 20, "16 MB": 7, "64 MB": 3}
STEPS = 5


def run(*words: str) -> None:
    """Run a program that must succeed."""
    subprocess.run(words, check=True)


def make_network(names: list[str], rate: str) -> None:
    """The hosts and the cable."""
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
    """Start the ranks and show what rank 0 tells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=1000, help="the link's rate, in Mbit/s, default 1000")
    parser.add_argument("--only", choices=[*SIZES, "DDP"], action="append", help="measure only this")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = options.only or [*SIZES, "DDP"]
    if options.rank is not None:
        work(options.rank, wanted)
        return
    names = [f"tqbench{os.getpid()}h{host}" for host in range(HOSTS)]
    environment = {**os.environ, "TORCHESTRA_SECRET": os.urandom(16).hex(), "GLOO_SOCKET_IFNAME": "eth0"}
    environment["OMP_NUM_THREADS"] = "1"
    workers: list[subprocess.Popen[str]] = []
    try:
        make_network(names, f"{options.mbit}mbit")
        for rank in range(RANKS):
            command = ["ip", "netns", "exec", names[rank * HOSTS // RANKS], sys.executable, *sys.argv]
            pipe = subprocess.PIPE if rank == 0 else None
            command += ["--rank", str(rank)]
            workers.append(subprocess.Popen(command, env=environment, stdout=pipe, text=True))
        output = workers[0].stdout
        assert output is not None
        print(f"{HOSTS} hosts x {RANKS // HOSTS} ranks, {options.mbit} Mbit/s, float32; ms", flush=True)
        print(f"{'all_reduce':>10} {'torchestra':>11} {'Gloo':>9} {'faster':>7} {'bound':>8} {'of bound':>9}")
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


def bound(size: int, mbit: int) -> float:
    """Seconds; see above."""
    sent = 2 * (HOSTS - 1) / HOSTS * size
    return sent * (SEGMENT + HEADERS) / SEGMENT * 8 / (mbit * 1e6)


def report(found: dict[str, float | str], mbit: int) -> None:
    """A line of the table."""
    name, ours, theirs = str(found["what"]), float(found["ours"]), float(found["gloo"])
    line = f"{name:>10} {ours * 1e3:11.2f} {theirs * 1e3:9.2f} {theirs / ours:7.2f}"
    if name in SIZES:
        least = bound(SIZES[name], mbit)
        line += f" {least * 1e3:8.2f} {ours / least:9.2f}"
    print(line, flush=True)


def work(rank: int, wanted: list[str]) -> None:
    """One rank's life."""
    import torch
    import torch.distributed as theirs

    import torchestra as ours

    torch.set_num_threads(1)
    theirs.init_process_group("gloo", f"tcp://{ADDRESS.format(1)}:{PORT}", rank=rank, world_size=RANKS)
    ours.init_process_group(
        init_method=f"tcp://{ADDRESS.format(1)}:{STORE_PORT}", rank=rank, world_size=RANKS
    )
    for name in wanted:
        if name == "DDP":
            told = compare(name, training_step(ours), training_step(theirs), STEPS)
        else:
            tensor = torch.zeros(SIZES[name] // 4)
            operations = partial(ours.all_reduce, tensor), partial(theirs.all_reduce, tensor)
            told = compare(name, *operations, ROUNDS[name])
        if rank == 0:
            print(json.dumps(told), flush=True)
    ours.barrier()
    ours.destroy_process_group()
    theirs.destroy_process_group()


def compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> dict[str, float | str]:
    """The two in turn, after two of each that do not count."""
    times: dict[str, list[float]] = {"ours": [], "gloo": []}
    for number in range(rounds + 2):
        for which, operation in (("ours", ours), ("gloo", theirs)):
            seconds = slowest(operation)
            if number >= 2:
                times[which].append(seconds)
    return {"what": name, **{which: statistics.median(each) for which, each in times.items()}}


def slowest(operation: Callable[[], object]) -> float:
    """How long it takes until all ranks have done it, begun together."""
    import torch

    import torchestra as ours

    ours.barrier()
    started = time.perf_counter()
    operation()
    found = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    ours.all_reduce(found, ours.ReduceOp.MAX)
    return found.item()


def training_step(package: object) -> Callable[[], object]:
    """A step of an MLP under the package's DistributedDataParallel."""
    import torch
    from torch import nn

    import torchestra as ours

    widths = (1024, 2048, 2048, 1024)
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
    wrap = (
        ours.nn.parallel.DistributedDataParallel if package is ours else nn.parallel.DistributedDataParallel
    )
    model = wrap(nn.Sequential(*layers[:-1]))
    inputs = torch.randn(32, widths[0])

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad

    return step


if __name__ == "__main__":
    main()
