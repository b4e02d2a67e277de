"""Predicted beside measured: `make bench-prediction`.

The host is calibrated, then the collectives are timed on it with 1 to 16 ranks, and steps of an MLP under
DistributedDataParallel with some of these. Then three network namespaces with three ranks each are joined by
links of 100 Mbit/s and of 1 Gbit/s; the link is calibrated between two of them, and the same is timed in
groups of 2 and 3 hosts with 1 to 3 ranks on each. All hosts share the cores of this machine, in the
predictions too. Every measured time is then predicted from the calibrations alone.

All is measured twice, by other processes each time: no prediction can be nearer than the two are to each
other. Sizes, numbers of ranks and hosts, and steps that `calibrate` does not time itself are told apart.

A size is what each rank puts in. A time is the median over batches of calls that follow each other, of the
slowest rank. The error is the difference between predicted and measured, by measured.

The namespaces need Linux, root, iproute2 and a kernel with veth, bridge and tbf.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.namespaces import Namespaces
from benchmarks.prediction_report import Result, print_results
from benchmarks.ranks.predicted import STEP_SOURCE, STEPS, join_and_time
from torchestra.engine.operations import COLLECTIVES
from torchestra.engine.recorder.trace import replacing
from torchestra.launcher.api import launch
from torchestra.monitor.bench import parse_size
from torchestra.performance.calibration import (
    Calibration,
    HostCalibration,
    LinkCalibration,
    StepCalibration,
)
from torchestra.performance.conditions import conditions
from torchestra.performance.decoding import decode, encode
from torchestra.performance.fitting import fit_link_operations
from torchestra.performance.host import HostOptions, measure_host
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import predict, steady_state_seconds, step_of
from torchestra.performance.step_timing import measure_step
from torchestra.performance.what_if import rebucketed
from torchestra.performance.workload import Operation

_SIZES = "4B,4KB,64KB,1MB,16MB"
_HOST_SIZES = {100: "4B,4KB,64KB", 1000: "4B,4KB,64KB,1MB"}
_HOST_OPS = "barrier,all_reduce,broadcast,reduce_scatter_tensor,all_gather_into_tensor,all_to_all_single"
_RANKS = "1,2,3,4,5,6,8,10,12,16"
_STEP_RANKS = (1, 2, 4, 8)
_LAYOUTS = tuple((hosts, ranks) for hosts in (2, 3) for ranks in (1, 2, 3))
_MAX_BYTES = 256 << 20
"""Of the results of all ranks together: what needs more is left out."""
_PORT = 29643
_PARTS = ("calibration", "ranks", "links")


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
    parser.add_argument("--once", action="store_true", help="measure each time once, not twice")
    parser.add_argument(
        "--part", choices=_PARTS, help="measure only this, and keep what FILE of -o has of the rest"
    )
    parser.add_argument("--no-hosts", action="store_true", help="only one host")
    parser.add_argument("--no-steps", action="store_true", help="no training steps")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict anew what FILE has measured")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    began = time.monotonic()
    if options.part and not options.output:
        parser.error("--part needs -o FILE")
    measurement = _read(options.again) if options.again else _measure(options)
    _say(f"measured in {time.monotonic() - began:.0f} s")
    if options.part:
        _write(options.output, measurement, [_unpredicted(*each) for each in measurement.times])
        return 0
    results = [*_predicted(measurement)]
    if options.output:
        _write(options.output, measurement, results)
    print_results(results, measurement.calibration, measurement.links)
    _say(f"{time.monotonic() - began:.0f} s")
    return 0


_Times = tuple[int, int, int, str, int, list[float]]


@dataclass(frozen=True)
class Measurement:
    """All that was measured.

    Attributes:
        calibration: of the host and the step.
        links: by their rate in Mbit/s, with what operations of two hosts tell.
        per_op_s: likewise, what a host's calibration has of operations over hosts.
        times: hosts, ranks on each, rate, operation, bytes; and seconds, measured once or twice.
    """

    calibration: Calibration
    links: dict[int, LinkCalibration]
    per_op_s: dict[int, dict[str, float]]
    times: list[_Times]


def _measure(options: argparse.Namespace) -> Measurement:
    os.environ["OMP_NUM_THREADS"] = "1"
    part = options.part
    if part in (None, "calibration"):
        measurement = Measurement(_calibrate(options), {}, {}, [])
    else:
        measurement = _read(options.output)
    if part in (None, "ranks"):
        measurement.times.extend(_measure_ranks(options, measurement.calibration.step is not None))
    if part == "links" or (part is None and not options.no_hosts):
        for text in options.mbit.split(","):
            _measure_hosts(int(text), options, measurement)
    return measurement


def _calibrate(options: argparse.Namespace) -> Calibration:
    """Calibrate the host, and the step unless there is to be none."""
    now = conditions(0.5)
    host, spread = measure_host(HostOptions(), _say)
    step: StepCalibration | None = None
    if not options.no_steps:
        most = max(hosts * ranks for hosts, ranks in _LAYOUTS)
        step, more = measure_step(STEP_SOURCE, (*_STEP_RANKS, 3, 6, most), 1.0, 0.5, _say)
        spread |= more
    return Calibration(host, None, step, replace(now, spread=spread))


def _measure_ranks(options: argparse.Namespace, with_steps: bool) -> Iterator[_Times]:
    """Measure on one host, with each number of ranks."""
    names, sizes = options.ops.split(","), [parse_size(text) for text in options.sizes.split(",")]
    for ranks in (int(text) for text in options.ranks.split(",")):
        cells = [*_cells(names, sizes, ranks)]
        if with_steps and ranks in _STEP_RANKS:
            cells += [(name, 0) for name in STEPS]
        _say(f"{len(cells)} times of {ranks} ranks")
        found = [launch(join_and_time, ranks, cells, options.seconds)[0] for _ in range(2 - options.once)]
        for cell, times in zip(cells, zip(*found, strict=True), strict=True):
            yield 1, ranks, 0, *cell, [*times]


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
    steps = [] if options.no_steps else [(name, 0) for name in STEPS]
    layouts: list[dict[str, Any]] = [
        {"hosts": hosts, "ranks": ranks, "cells": [*_cells(names, sizes, hosts * ranks), *steps]}
        for hosts, ranks in _LAYOUTS
    ]
    _say(f"{sum(len(layout['cells']) for layout in layouts)} times over links of {mbit} Mbit/s")
    found, *again = (
        _run_hosts(mbit, layouts, options.seconds, calibrates=number == 0)
        for number in range(2 - options.once)
    )
    link = decode(LinkCalibration, found["link"])
    host = measurement.calibration.host
    host = replace(host, per_op_s={**host.per_op_s, **found["per_op_s"]})
    operations: defaultdict[int, dict[Operation, float]] = defaultdict(dict)
    for ranks, name, nbytes, seconds in found["operations"]:
        operations[ranks][Operation(name, nbytes)] = seconds
    measurement.links[mbit] = fit_link_operations(host, link, operations)
    measurement.per_op_s[mbit] = found["per_op_s"]
    for layout, *others in zip(found["found"], *(each["found"] for each in again), strict=True):
        times = zip(*(each["seconds"] for each in (layout, *others)), strict=True)
        for cell, each in zip(layout["cells"], times, strict=True):
            measurement.times.append((layout["hosts"], layout["ranks"], mbit, *cell, [*each]))


def _run_hosts(mbit: int, layouts: Sequence[dict[str, Any]], seconds: float, *, calibrates: bool) -> Any:
    """Return what the ranks of namespaces found: times of the layouts, and of the link if wanted."""
    number, nproc = (max(numbers) for numbers in zip(*_LAYOUTS, strict=True))
    environment = {**os.environ, "TORCHESTRA_SECRET": os.urandom(16).hex()}
    with tempfile.TemporaryDirectory() as directory, Namespaces(number, mbit) as network:
        output = Path(directory) / "found.json"
        arguments = [str(output), str(seconds), json.dumps(layouts), str(int(calibrates))]
        program = ["-m", "benchmarks.ranks.predicted", *arguments]
        run = [sys.executable, "-m", "torchestra", "run", "--nnodes", str(number), "--nproc", str(nproc)]
        run += ["--rendezvous", f"{network.addresses[0]}:{_PORT}"]
        launchers = [
            subprocess.Popen(
                [*network.inside(host), *run, "--node-rank", str(host), *program], env=environment
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
        return json.loads(output.read_text())


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
        if name in STEPS:
            assert calibration.step is not None
            step = step_of(calibration.step, machine)
            if (megabytes := STEPS[name]) is not None:
                step = rebucketed(step, megabytes << 20)
            predicted = predict(step, machine).seconds
        else:
            predicted = steady_state_seconds(Operation(name, nbytes), machine)
        yield Result(hosts, ranks, mbit, name, nbytes, seconds[0], predicted, *seconds[1:])


def _unpredicted(hosts: int, ranks: int, mbit: int, name: str, nbytes: int, seconds: list[float]) -> Result:
    return Result(hosts, ranks, mbit, name, nbytes, seconds[0], 0.0, *seconds[1:])


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
                [each["measured_s"], *([again_s] if (again_s := each.get("again_s")) else [])],
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
