"""Predicted beside measured: `make bench-prediction`.

The host is calibrated, then the collectives are timed on it with 1 to 16 ranks, and steps of an MLP under
DistributedDataParallel with some of these. Then three network namespaces with three ranks each are joined by
links of 100 Mbit/s and of 1 Gbit/s; the link is calibrated between two of them, and the same is timed in
groups of 2 and 3 hosts with 1 to 3 ranks on each. All hosts share the cores of this machine, in the
predictions too. Every measured time is then predicted from the calibrations alone.

A size is what each rank puts in. A time is the median over batches of calls that follow each other, of the
slowest rank. The error is the difference between predicted and measured, by measured.

The namespaces need Linux, root, iproute2 and a kernel with veth, bridge and tbf.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.namespaces import Namespaces
from benchmarks.ranks.predicted import STEP, STEP_SOURCE, join_and_time
from torchestra.engine.operations import COLLECTIVES
from torchestra.engine.recorder.trace import replacing
from torchestra.launcher.api import launch
from torchestra.monitor.bench import parse_size, size_label
from torchestra.performance.calibration import (
    Calibration,
    HostCalibration,
    LinkCalibration,
    StepCalibration,
)
from torchestra.performance.conditions import conditions
from torchestra.performance.decoding import decode, encode
from torchestra.performance.host import HostOptions, measure_host
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import predict_step, steady_state_seconds
from torchestra.performance.step_timing import measure_step
from torchestra.performance.workload import Operation

_SIZES = "4B,4KB,64KB,1MB,16MB"
_HOST_SIZES = {100: "4B,4KB,64KB", 1000: "4B,4KB,64KB,1MB"}
_HOST_OPS = "barrier,all_reduce,broadcast,reduce_scatter_tensor,all_gather_into_tensor,all_to_all_single"
_RANKS = "1,2,3,4,6,8,12,16"
_STEP_RANKS = (1, 2, 4, 8)
_LAYOUTS = tuple((hosts, ranks) for hosts in (2, 3) for ranks in (1, 2, 3))
_MAX_BYTES = 256 << 20
"""Of the results of all ranks together: what needs more is left out."""
_PORT = 29643
_WORST, _WIDTH = 12, 110


@dataclass(frozen=True)
class Result:
    """One measured time and its prediction, in seconds.

    Attributes:
        hosts, ranks_per_host: of the group.
        mbit: the rate of the links; 0 on one host.
        operation: a collective, or ``"DDP step"``.
        nbytes: what each rank puts in; 0 for a barrier and a step.
    """

    hosts: int
    ranks_per_host: int
    mbit: int
    operation: str
    nbytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Return the difference by the measured time; negative if the prediction is too short."""
        return self.predicted_s / self.measured_s - 1

    @property
    def layout(self) -> str:
        """Return where it was, for people."""
        if self.hosts == 1:
            return f"1 host x {self.ranks_per_host}"
        return f"{self.hosts} hosts x {self.ranks_per_host}, {self.mbit} Mbit/s"


def main() -> int:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default=_RANKS, metavar="N,…", help="on one host (%(default)s)")
    parser.add_argument("--sizes", default=_SIZES, metavar="SIZE,…", help="on one host (%(default)s)")
    parser.add_argument("--mbit", default="100,1000", metavar="N,…", help="of the links (%(default)s)")
    parser.add_argument("--ops", default=",".join(COLLECTIVES), metavar="OP,…", help="collectives (all)")
    parser.add_argument(
        "--host-ops", default=_HOST_OPS, metavar="OP,…", help="collectives over several hosts (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.02, metavar="S", help="for a time (%(default)s)")
    parser.add_argument("--no-hosts", action="store_true", help="only one host")
    parser.add_argument("--no-steps", action="store_true", help="no training steps")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict anew what FILE has measured")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    began = time.monotonic()
    measurement = _read(options.again) if options.again else _measure(options)
    _say(f"measured in {time.monotonic() - began:.0f} s; predicting")
    results = [*_predicted(measurement)]
    if options.output:
        _write(options.output, measurement, results)
    _print(results, measurement.calibration)
    _say(f"{time.monotonic() - began:.0f} s")
    return 0


@dataclass(frozen=True)
class Measurement:
    """All that was measured.

    Attributes:
        calibration: of the host and the step.
        links: by their rate in Mbit/s.
        per_op_s: likewise, what a host's calibration has of operations over hosts.
        times: hosts, ranks on each, rate, operation, bytes and seconds.
    """

    calibration: Calibration
    links: dict[int, LinkCalibration]
    per_op_s: dict[int, dict[str, float]]
    times: list[tuple[int, int, int, str, int, float]]


def _measure(options: argparse.Namespace) -> Measurement:
    os.environ["OMP_NUM_THREADS"] = "1"
    names, sizes = options.ops.split(","), [parse_size(text) for text in options.sizes.split(",")]
    counts = [int(text) for text in options.ranks.split(",")]
    now = conditions(0.5)
    host, spread = measure_host(HostOptions(), _say)
    step: StepCalibration | None = None
    if not options.no_steps:
        most = max(hosts * ranks for hosts, ranks in _LAYOUTS)
        step, more = measure_step(STEP_SOURCE, (*_STEP_RANKS, 3, 6, most), 1.0, 0.5, _say)
        spread |= more
    calibration = Calibration(host, None, step, replace(now, spread=spread))
    times = []
    for ranks in counts:
        cells = [*_cells(names, sizes, ranks)]
        if step is not None and ranks in _STEP_RANKS:
            cells.append((STEP, 0))
        _say(f"{len(cells)} times of {ranks} ranks")
        found = launch(join_and_time, ranks, cells, options.seconds)[0]
        times += [(1, ranks, 0, *cell, each) for cell, each in zip(cells, found, strict=True)]
    measurement = Measurement(calibration, {}, {}, times)
    if not options.no_hosts:
        for text in options.mbit.split(","):
            _measure_hosts(int(text), options, measurement)
    return measurement


def _cells(names: Sequence[str], sizes: Iterable[int], ranks: int) -> Iterator[tuple[str, int]]:
    """Yield the operations and sizes to measure with so many ranks."""
    for name in names:
        if COLLECTIVES[name].input is None:
            yield name, 0
        else:
            yield from ((name, nbytes) for nbytes in sizes if nbytes * ranks * ranks <= _MAX_BYTES)


def _measure_hosts(mbit: int, options: argparse.Namespace, measurement: Measurement) -> None:
    """Measure on namespaces whose links have this rate."""
    names = options.host_ops.split(",")
    text = _HOST_SIZES.get(mbit, _HOST_SIZES[1000])
    sizes = [parse_size(each) for each in text.split(",")]
    steps = [] if options.no_steps else [(STEP, 0)]
    layouts: list[dict[str, Any]] = [
        {"hosts": hosts, "ranks": ranks, "cells": [*_cells(names, sizes, hosts * ranks), *steps]}
        for hosts, ranks in _LAYOUTS
    ]
    _say(f"{sum(len(layout['cells']) for layout in layouts)} times over links of {mbit} Mbit/s")
    number = max(hosts for hosts, _ in _LAYOUTS)
    environment = {**os.environ, "TORCHESTRA_SECRET": os.urandom(16).hex()}
    with tempfile.TemporaryDirectory() as directory, Namespaces(number, mbit) as network:
        output = Path(directory) / "found.json"
        arguments = [str(output), str(options.seconds), json.dumps(layouts)]
        program = ["-m", "benchmarks.ranks.predicted", *arguments]
        ranks = str(max(ranks for _, ranks in _LAYOUTS))
        job = [
            "run",
            "--nnodes",
            str(number),
            "--nproc",
            ranks,
            "--rendezvous",
            f"{network.addresses[0]}:{_PORT}",
        ]
        launchers = [
            subprocess.Popen(
                [
                    *network.inside(host),
                    sys.executable,
                    "-m",
                    "torchestra",
                    *job,
                    "--node-rank",
                    str(host),
                    *program,
                ],
                env=environment,
            )
            for host in range(number)
        ]
        try:
            codes = [launcher.wait() for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
        if any(codes):
            sys.exit(f"the ranks on {number} hosts ended with {codes}")
        found: Any = json.loads(output.read_text())
    measurement.links[mbit] = decode(LinkCalibration, found["link"])
    measurement.per_op_s[mbit] = found["per_op_s"]
    for layout in found["found"]:
        for (name, nbytes), seconds in zip(layout["cells"], layout["seconds"], strict=True):
            measurement.times.append((layout["hosts"], layout["ranks"], mbit, name, nbytes, seconds))


def _predicted(measurement: Measurement) -> Iterator[Result]:
    """Predict every time that was measured."""
    calibration = measurement.calibration
    machines: dict[tuple[int, int, int], Machine] = {}
    for hosts, ranks, mbit, name, nbytes, seconds in measurement.times:
        machine = machines.get((hosts, ranks, mbit))
        if machine is None:
            host: HostCalibration = calibration.host
            if hosts > 1:
                host = replace(host, per_op_s={**host.per_op_s, **measurement.per_op_s[mbit]})
            link = measurement.links[mbit] if hosts > 1 else None
            machine = machines[hosts, ranks, mbit] = Machine(hosts, ranks, host, link)
        if name == STEP:
            assert calibration.step is not None
            predicted = predict_step(calibration.step, machine).seconds
        else:
            predicted = steady_state_seconds(Operation(name, nbytes), machine)
        yield Result(hosts, ranks, mbit, name, nbytes, seconds, predicted)


def _read(path: Path) -> Measurement:
    """Read what :func:`_write` wrote."""
    found = json.loads(path.read_text())
    return Measurement(
        decode(Calibration, found["calibration"]),
        {int(mbit): decode(LinkCalibration, link) for mbit, link in found["links"].items()},
        {int(mbit): costs for mbit, costs in found["per_op_s"].items()},
        [
            (
                each["hosts"],
                each["ranks_per_host"],
                each["mbit"],
                each["operation"],
                each["nbytes"],
                each["measured_s"],
            )
            for each in found["results"]
        ],
    )


def _write(path: Path, measurement: Measurement, results: Sequence[Result]) -> None:
    told = {
        "calibration": encode(measurement.calibration),
        "links": {str(mbit): encode(link) for mbit, link in measurement.links.items()},
        "per_op_s": {str(mbit): costs for mbit, costs in measurement.per_op_s.items()},
        "results": [{**asdict(each), "error": each.error} for each in results],
    }
    with replacing(path) as file:
        json.dump(told, file, indent=1)


def _print(results: Sequence[Result], calibration: Calibration) -> None:
    """Print the median errors, by layout and by operation, and the worst predictions."""
    console = Console(width=_WIDTH)
    busy = calibration.conditions.busy_share
    told = "unknown" if busy is None else f"{busy:.0%}"
    console.print(f"share of the cores that other programs used at the start: {told}", highlight=False)
    _print_errors(console, "where", results, [each.layout for each in results])
    _print_errors(console, "operation", results, [each.operation for each in results])
    worst = Table("where", "operation", "size", "measured µs", "predicted µs", "error", box=None)
    for each in sorted(results, key=lambda result: -abs(result.error))[:_WORST]:
        size = size_label(each.nbytes) if each.nbytes else ""
        times = (f"{seconds * 1e6:,.1f}" for seconds in (each.measured_s, each.predicted_s))
        worst.add_row(each.layout, each.operation, size, *times, f"{each.error:+.0%}")
    console.print("the worst:", worst)
    if results:
        median = statistics.median(abs(each.error) for each in results)
        console.print(f"median error of all {len(results)}: {median:.1%}", style="bold", highlight=False)


def _print_errors(console: Console, title: str, results: Sequence[Result], keys: Sequence[str]) -> None:
    table = Table(title, "times", "median error", "within 10 %", "median of predicted / measured", box=None)
    for key in dict.fromkeys(keys):
        chosen = [each for each, its in zip(results, keys, strict=True) if its == key]
        errors = [abs(each.error) for each in chosen]
        within = sum(error <= 0.1 for error in errors) / len(errors)
        ratio = statistics.median(each.error + 1 for each in chosen)
        table.add_row(
            key, str(len(chosen)), f"{statistics.median(errors):.1%}", f"{within:.0%}", f"{ratio:.2f}"
        )
    console.print(table)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
