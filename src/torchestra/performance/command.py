"""``torchestra simulate``: predict how long operations, a training step or a recorded job take."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchestra.errors import DistError, InvalidArgumentError

if TYPE_CHECKING:
    from torchestra.performance.calibration import Calibration, LinkCalibration
    from torchestra.performance.machine import Machine
    from torchestra.performance.recorded_job import RecordedJob
    from torchestra.performance.workload import Workload

_EPILOG = """\
Schedules come from the algorithms themselves, which run with primitives that move no bytes; the times are
those that `torchestra calibrate` has measured. --latency and --bandwidth replace those of the measured link.

  torchestra simulate --calibration here.json --hosts 2 --ranks 8 --operations all_reduce:25MB,barrier
  torchestra simulate --calibration here.json --hosts 12500 --ranks 8 --gradients 100MB --compute 0.5 \\
      --latency 20us --bandwidth 100Gbit --faults
  torchestra simulate --calibration here.json --hosts 4 --ranks 8 --record records/ --json

docs/scaling.md says what the model knows and what it does not.
"""
_BUCKET = "25MB"
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--calibration", type=Path, required=True, metavar="FILE", help="by torchestra calibrate"
    )
    parser.add_argument("--hosts", type=int, metavar="H", help="how many hosts (1, or as recorded)")
    parser.add_argument("--ranks", type=int, metavar="R", help="ranks on each host (1, or as recorded)")
    parser.add_argument("--cores", type=int, metavar="N", help="cores of each host (default: as calibrated)")
    parser.add_argument("--latency", metavar="TIME", help="of the link, say 50us (default: as calibrated)")
    parser.add_argument("--bandwidth", metavar="RATE", help="of the link, say 10Gbit (default: calibrated)")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument(
        "--operations", metavar="NAME:SIZE,…", help="collectives, one after the other, say all_reduce:25MB"
    )
    work.add_argument("--step", action="store_true", help="the training step that is in the calibration")
    work.add_argument("--gradients", metavar="SIZE", help="a training step with so many bytes of gradients")
    work.add_argument(
        "--record",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a recorded job: traces, or their directories",
    )
    parser.add_argument(
        "--compute",
        type=float,
        metavar="S",
        help="seconds of compute, for --gradients (0)",
    )
    parser.add_argument("--bucket", metavar="SIZE", help="bucket_cap_mb, for --gradients (25MB)")
    parser.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="RANK=FACTOR",
        help="a rank that computes longer",
    )
    parser.add_argument(
        "--slow-link",
        action="append",
        default=[],
        metavar="HOST=SHARE",
        help="a link with a share of its speed",
    )
    parser.add_argument(
        "--faults", action="store_true", help="show what slow ranks, links and dead hosts cost"
    )
    parser.add_argument(
        "--sweep", choices=("buckets", "thresholds"), help="compare bucket sizes or thresholds"
    )
    parser.add_argument("--control", action="store_true", help="show who sends control messages to whom")
    parser.add_argument("--simgrid", action="store_true", help="replay the schedule on SimGrid as well")
    parser.add_argument("--goal", type=Path, metavar="FILE", help="write the schedule, for LogGOPSim")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def main(options: argparse.Namespace) -> int:
    """Print the prediction; return 2 if an argument is wrong, 1 if the simulation failed."""
    try:
        answers = answers_to(options)
    except InvalidArgumentError as error:
        print(f"torchestra simulate: {error}", file=sys.stderr)
        return 2
    except (DistError, OSError) as error:
        print(f"torchestra simulate: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(answers, indent=1))
    else:
        from torchestra.performance.tables import show

        show(answers)
    return 0


def answers_to(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for, ready for JSON.

    Raises:
        InvalidArgumentError: an argument is wrong, or does not fit another.
    """
    from torchestra.performance import closed_form, control_traffic, goal, simgrid_replay, what_if
    from torchestra.performance.prediction import predict, schedule_of
    from torchestra.performance.recorded_job import read_job
    from torchestra.performance.workload import Step

    for name in ("compute", "bucket"):
        if getattr(options, name) is not None and options.gradients is None:
            raise InvalidArgumentError(
                f"--{name} is for --gradients; other steps and operations have their own"
            )
    job = None if options.record is None else read_job(options.record)
    machine, calibration = _machine(options, job)
    workload = _workload(options, machine, calibration) if job is None else job.workload
    prediction = predict(workload, machine)
    answers: dict[str, Any] = {
        "hosts": machine.hosts,
        "ranks_per_host": machine.ranks_per_host,
        "workload": _described(workload),
        "seconds": prediction.seconds,
        "waiting_share": prediction.waiting_share,
        "messages_of_a_host": prediction.messages,
        "bytes_of_a_host": prediction.nbytes,
    }
    if job is not None:
        answers["recorded_seconds"] = job.seconds
    if (estimate := closed_form.estimate(workload, machine)) is not None:
        answers["closed_form_seconds"] = estimate
    if options.faults:
        answers["faults"] = [asdict(each) for each in what_if.fault_costs(workload, machine, prediction)]
    if options.sweep == "buckets":
        if not isinstance(workload, Step):
            raise InvalidArgumentError("--sweep buckets is for a training step: --step or --gradients")
        answers["buckets"] = [asdict(each) for each in what_if.bucket_sweep(workload, machine)]
    if options.sweep == "thresholds":
        answers["thresholds"] = [asdict(each) for each in what_if.threshold_sweep(workload, machine)]
    if options.control:
        answers["control"] = [asdict(each) for each in control_traffic.control_traffic(machine)]
    if options.simgrid:
        answers["simgrid_seconds"] = simgrid_replay.replay(schedule_of(workload, machine), machine)
    if options.goal is not None:
        ranks = goal.write_goal(options.goal, schedule_of(workload, machine), machine)
        answers["goal"] = {"path": str(options.goal), "ranks": ranks}
    return answers


def _machine(options: argparse.Namespace, job: RecordedJob | None) -> tuple[Machine, Calibration]:
    from torchestra.performance.calibration import Calibration
    from torchestra.performance.machine import Machine

    calibration = Calibration.load(options.calibration)
    host = calibration.host
    if options.cores is not None:
        host = replace(host, cores=_at_least_one("--cores", options.cores))
    recorded = (1, 1) if job is None else (job.hosts, job.ranks_per_host)
    hosts, ranks = (
        each if given is None else given
        for each, given in zip(recorded, (options.hosts, options.ranks), strict=True)
    )
    machine = Machine(
        _at_least_one("--hosts", hosts),
        _at_least_one("--ranks", ranks),
        host,
        _link(options, calibration.link),
        dict(map(_pair, options.straggler)),
        dict(map(_pair, options.slow_link)),
    )
    return machine, calibration


def _at_least_one(name: str, number: int) -> int:
    if number < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {number}")
    return number


def _link(options: argparse.Namespace, measured: LinkCalibration | None) -> LinkCalibration | None:
    """Return the measured link with another latency or bandwidth, if these are given."""
    from torchestra.performance.calibration import LinkCalibration, LinkClass

    if options.latency is None and options.bandwidth is None:
        return measured
    if measured is None and (options.latency is None or options.bandwidth is None):
        raise InvalidArgumentError("the calibration has no link: give both --latency and --bandwidth")
    changes: dict[str, Any] = {}
    if options.latency is not None:
        changes["latency_s"] = _quantity("--latency", options.latency, _TIME_UNITS)
    if options.bandwidth is not None:
        changes["gap_per_byte_s"] = 8 / _quantity("--bandwidth", options.bandwidth, _RATE_UNITS)
    bare = LinkCalibration((LinkClass(None, 0.0, 0.0, 0.0, 0.0, 0.0),))
    link = measured or bare
    classes = tuple(replace(each, **changes) for each in link.classes)
    # Another link is one between machines of their own, and over it no operation has been timed.
    return replace(link, classes=classes, shares_cores=False, operations=())


def _quantity(name: str, text: str, units: Mapping[str, float]) -> float:
    """Read a number with a unit."""
    lower = text.strip().lower().removesuffix("/s") if units is _RATE_UNITS else text.strip().lower()
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if lower.endswith(unit)), None)
    try:
        number = float(lower.removesuffix(unit or "")) * units[unit or ""]
    except (ValueError, KeyError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgumentError(f"{name} is a number above 0 and one of {', '.join(units)}, got {text!r}")
    return number


def _pair(text: str) -> tuple[int, float]:
    number, _, value = text.partition("=")
    try:
        return int(number), float(value)
    except ValueError:
        raise InvalidArgumentError(f"--straggler and --slow-link take NUMBER=VALUE, got {text!r}") from None


def _workload(options: argparse.Namespace, machine: Machine, calibration: Calibration) -> Workload:
    """Return what is to be simulated, which is no recorded job."""
    from torchestra.performance.prediction import step_of
    from torchestra.performance.what_if import rebucketed
    from torchestra.performance.workload import Operation, Step, parse_bytes

    if options.operations is not None:
        return [Operation.parse(text) for text in options.operations.split(",")]
    if options.step:
        if calibration.step is None:
            raise InvalidArgumentError(
                f"{options.calibration} has no training step; see torchestra calibrate"
            )
        return step_of(calibration.step, machine)
    gradients, bucket = parse_bytes(options.gradients), parse_bytes(options.bucket or _BUCKET)
    if gradients < 1 or bucket < 1:
        raise InvalidArgumentError("--gradients and --bucket must be above 0")
    compute_s = 0.0 if options.compute is None else options.compute
    if not (math.isfinite(compute_s) and compute_s >= 0):
        raise InvalidArgumentError(f"--compute must be >= 0 seconds, got {compute_s}")
    forward_s, backward_s = compute_s / 3, compute_s * 2 / 3
    overlaps = machine.hosts > 1 or machine.ranks_per_host < machine.host.cores
    whole = Step(forward_s, backward_s, 0.0, (gradients,), (backward_s,), overlaps=overlaps)
    return rebucketed(whole, bucket)


def _described(workload: Workload) -> str:
    from torchestra.performance.workload import Operation, Step, shown_bytes

    if isinstance(workload, Step):
        total, number = shown_bytes(sum(workload.bucket_bytes)), len(workload.bucket_bytes)
        return f"a training step with {total} of gradients in {number} buckets"
    operations = [each for each in workload if isinstance(each, Operation)]
    return ", ".join(map(str, operations)) if len(operations) <= 5 else f"{len(operations)} collectives"
