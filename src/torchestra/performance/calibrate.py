"""``torchestra calibrate``: measure this machine, a link and a training step, for ``torchestra simulate``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchestra.errors import DistBackendError, DistError, InvalidArgumentError

if TYPE_CHECKING:
    from torchestra.performance.calibration import Calibration
    from torchestra.performance.link_timing import LinkMeasurement

_PARTS = ("host", "link", "step")
_WATCH_S = 0.5
_BUSY, _TOO_BUSY = 0.05, 0.25
_WIDE_SPREAD = 0.25
_LINK_SHARE = 8  # a link has more sizes to measure than a host has parts
_FAILED, _MISUSE = 1, 2
_EPILOG = """\
Measured of the host: a call of each operation; how long until another rank sees a flag, wakes up, or gets the
core; and how fast ranks copy and reduce, by the size of their tensors and by how many do so at once.

Of a link: run it on ranks of two hosts or more, under any launcher. One rank on each host is enough:

  torchestra run --nnodes 2 --nproc 1 --node-rank K --rendezvous HOST:PORT -m torchestra calibrate -o FILE

Rank 0 measures its host and the link to the second host, and writes the file on its host.

Of a training step: --step FILE.py:FUNCTION names a function that returns a model, a function that computes a
loss of it, and optionally its optimizer:

  def step():
      model, batch = torch.nn.Linear(64, 8), torch.randn(16, 64)
      return model, lambda model: model(batch).square().mean()

Numbers are medians. They are wrong if the machine does other things meanwhile: if these take more than 5 % of
its cores there is a warning, and above 25 % nothing is measured unless --busy is given. On a machine that is
never idle, --quantile 0.1 takes the fastest tenth of the samples in place of the median.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="where to write (JSON)"
    )
    parser.add_argument(
        "--only", choices=_PARTS, help="measure only this, and keep what FILE has of the rest"
    )
    parser.add_argument(
        "-n",
        "--nproc",
        metavar="N,…",
        help="numbers of ranks that copy at once (default: from 1 and the cores up to 16)",
    )
    parser.add_argument("--step", metavar="FILE.py:FUNCTION", help="a training step to measure")
    parser.add_argument(
        "--step-nproc",
        metavar="N,…",
        help="numbers of ranks that compute at once (default: 1, and the cores)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="time for each of about ten measurements (%(default)s)",
    )
    parser.add_argument(
        "--quantile", type=float, default=0.5, metavar="Q", help="of the samples (%(default)s, the median)"
    )
    parser.add_argument("--busy", action="store_true", help="measure even if the machine is busy")


def main(options: argparse.Namespace) -> int:
    """Measure and write; return 1 if a rank failed or the machine is busy, 2 if an argument is wrong."""
    from torchestra.rendezvous.environment import launch_environment

    try:
        _check(options)
        if (launch_environment().world_size or 1) > 1:
            _as_rank(options)
        elif options.only == "link":
            raise InvalidArgumentError("a link is measured by ranks on two hosts: see --help")
        else:
            _Measurement(options).run(None)
    except InvalidArgumentError as error:
        print(f"torchestra calibrate: {error}", file=sys.stderr)
        return _MISUSE
    except DistError as error:
        print(f"torchestra calibrate: {error}", file=sys.stderr)
        return _FAILED
    except OSError as error:
        print(f"torchestra calibrate: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return _FAILED
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse arguments that make no sense, on every rank alike.

    Raises:
        InvalidArgumentError: names the argument.
    """
    from torchestra.performance.host import HostOptions

    HostOptions(_counts(options.nproc), options.seconds, options.quantile)
    _counts(options.step_nproc)
    if options.only == "step" and not options.step:
        raise InvalidArgumentError("--only step needs --step FILE.py:FUNCTION")


def _as_rank(options: argparse.Namespace) -> None:
    """Be one of the ranks of a job: rank 0 measures, and the first two hosts exchange messages."""
    import torchestra as dist
    from torchestra.performance.link_timing import measure_link

    dist.init_process_group()
    try:
        link = partial(measure_link, _LINK_SHARE * options.seconds, options.quantile)
        wants_link = options.only in (None, "link")
        if dist.get_rank() == 0:
            _Measurement(options).run(link if wants_link else None)
        elif wants_link:
            link(lambda line: None)
    finally:
        dist.destroy_process_group()


class _Measurement:
    """One run of the command, on the rank that writes the file.

    Args:
        options: the command's.

    Raises:
        InvalidArgumentError: the file that is to be completed cannot be read, or none can be written.
        DistBackendError: the machine is busy.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from torchestra.performance.calibration import Calibration
        from torchestra.performance.conditions import conditions

        self._options = options
        self._earlier: Calibration | None = None
        if options.only is not None and (options.only != "host" or options.output.exists()):
            self._earlier = Calibration.load(options.output)
        folder = options.output.parent
        if options.output.is_dir() or not os.access(folder, os.W_OK):  # before all is measured, for nothing
            raise InvalidArgumentError(f"--output {options.output}: no file can be written there")
        self._began = time.monotonic()
        self._conditions = conditions(_WATCH_S)
        self._warnings = _busy_warnings(self._conditions.busy_share, options.busy)
        self._spread: dict[str, float] = {}

    def run(self, link: Callable[[Callable[[str], None]], LinkMeasurement | None] | None) -> None:
        """Measure, write the file, and print what is in it; ``link`` is called to measure a link."""
        with _progress() as progress:
            calibration = self._calibration(link, progress)
        self._warnings += [
            f"{name} varies by {spread:.0%}" for name, spread in self._spread.items() if spread > _WIDE_SPREAD
        ]
        told = replace(
            self._conditions,
            seconds=round(time.monotonic() - self._began, 1),
            spread=self._spread,
            warnings=tuple(self._warnings),
        )
        replace(calibration, conditions=told).save(self._options.output)
        for warning in self._warnings:
            print(f"torchestra calibrate: {warning}", file=sys.stderr)
        print("\n".join(summary(calibration)))
        print(f"wrote {self._options.output} in {told.seconds:g} s")

    def _calibration(
        self,
        measure_link: Callable[[Callable[[str], None]], LinkMeasurement | None] | None,
        progress: Callable[[str], None],
    ) -> Calibration:
        """Return what was measured, and the rest from the file."""
        from torchestra.launcher.cores import usable_cores
        from torchestra.performance.calibration import Calibration
        from torchestra.performance.fitting import fit_link_operations
        from torchestra.performance.host import HostOptions, measure_host
        from torchestra.performance.step_timing import measure_step

        options, earlier = self._options, self._earlier
        if options.only in (None, "host"):
            host_options = HostOptions(_counts(options.nproc), options.seconds, options.quantile)
            host, spread = measure_host(host_options, progress)
            self._spread |= spread
            calibration = Calibration(host) if earlier is None else replace(earlier, host=host)
        else:
            assert earlier is not None
            calibration = earlier
        if measure_link is not None:
            measured = measure_link(progress)
            assert measured is not None
            self._spread["link"] = measured.spread
            host = replace(calibration.host, per_op_s={**calibration.host.per_op_s, **measured.per_op_s})
            progress("fitting operations over both hosts")
            link = fit_link_operations(host, measured.link, measured.operations)
            calibration = replace(calibration, host=host, link=link)
        if options.step and options.only in (None, "step"):
            ranks = _counts(options.step_nproc) or (1, usable_cores())
            step, spread = measure_step(options.step, ranks, 2 * options.seconds, options.quantile, progress)
            self._spread |= spread
            calibration = replace(calibration, step=step)
        return calibration


def _busy_warnings(busy_share: float | None, is_accepted: bool) -> list[str]:
    """Return what to say about other programs on this machine.

    Raises:
        DistBackendError: they take too much of it.
    """
    if busy_share is None or busy_share <= _BUSY:
        return []
    told = f"other programs use {busy_share:.0%} of this machine's cores"
    if busy_share > _TOO_BUSY and not is_accepted:
        raise DistBackendError(f"{told}, so nothing was measured: end them, or give --busy")
    return [f"{told}: the times are too long"]


def summary(calibration: Calibration) -> list[str]:
    """Return lines that say what a calibration has, for people."""
    host, link, step = calibration.host, calibration.link, calibration.step
    large = max(rate.working_set_bytes for rate in host.copy)
    copies = [
        host.copy_bytes_per_s(nbytes, ranks) for nbytes, ranks in ((0, 1), (large, 1), (large, host.cores))
    ]
    cached, beyond, shared = (round(each / 1e9) for each in copies)
    lines = [
        f"host: {host.cores} cores; a call {_us(host.call_s)}, a flag {_us(host.flag_s)},"
        f" waking {_us(host.wakeup_s)}, a switch of ranks {_us(host.switch_s)}",
        f"memory: one rank copies {cached} GB/s from its caches and {beyond} GB/s beyond,"
        f" {host.cores} at once {shared} GB/s each",
    ]
    if link is not None:
        small, bulk = link.classes[0], link.classes[-1]
        one_way_s = small.send_overhead_s + small.latency_s + small.receive_overhead_s
        costs = bulk.gap_per_byte_s, bulk.send_overhead_per_byte_s, bulk.receive_overhead_per_byte_s
        where = "; its hosts share one machine's cores" if link.shares_cores else ""
        lines.append(
            f"link ({link.bridge}): {_us(one_way_s)} for a small message,"
            f" {1e-6 / max(*costs, 1e-15):.0f} MB/s for large ones{where}"
        )
    if step is not None:
        times, megabytes = step.times[0], sum(step.bucket_bytes) / 1e6
        lines.append(
            f"step {step.name}: forward {_us(times.forward_s)}, backward {_us(times.backward_s)},"
            f" the rest {_us(times.optimizer_s)}; {len(step.bucket_bytes)} buckets, {megabytes:.1f} MB"
        )
    return lines


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on the terminal what is measured; nothing if there is none."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Redrawn by hand: a thread that redraws would take a core from what is measured.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("starting", total=None)

        def show(line: str) -> None:
            progress.update(task, description=line, refresh=True)

        yield show


def _counts(text: str | None) -> tuple[int, ...]:
    """Return the numbers of ranks of an argument; none if it was not given."""
    from torchestra.performance.recording import MAX_RANKS_PER_HOST

    if text is None:
        return ()
    numbers = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and 0 < int(each) <= MAX_RANKS_PER_HOST for each in numbers):
        raise InvalidArgumentError(
            f"numbers of ranks must be like 1,2,4, and at most {MAX_RANKS_PER_HOST}, got {text!r}"
        )
    return tuple(sorted({int(each) for each in numbers}))
