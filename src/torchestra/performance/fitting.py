"""Fit what operations take longer among several ranks than their parts by themselves.

Parts are timed in loops that do nothing else. In an operation a rank comes back to caches that it, and those
with which it takes turns on a core, have used for other things meanwhile; and which of the waiting ranks has
the core next is up to the system. So a few operations are timed as well, and three things are fitted until
they are predicted best: what a switch between ranks takes, by how much calls are slower, and by how much
work on memory is, by size. No operation alone tells: how often a core goes from rank to rank depends on which
of them comes first, in the simulation and on the machine.

What is left is a factor for each operation that was timed (:func:`fit_factors`), which holds for it as a
whole. Of other sizes and numbers of ranks it is interpolated, so there the parts tell how time grows with
both, and beyond what was measured they do so alone.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torchestra.engine.operations import COLLECTIVES
from torchestra.monitor.operation_timing import Cell
from torchestra.performance.calibration import (
    HostCalibration,
    LinkCalibration,
    OperationFactor,
    Slowdown,
    SwitchTime,
)
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import steady_state
from torchestra.performance.workload import Operation

_SMALL_BYTES = 4
_SMALL = (
    "barrier",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "scan",
)
_LARGE = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_SIZES = (_SMALL_BYTES, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)
_MAX_BYTES = 256 << 20
"""Of the results of all ranks together."""

_SWITCHES = tuple(1.25**step for step in range(-6, 15))
_FACTORS = tuple(1.04**step for step in range(-35, 50))
_ROUNDS = 2

_Predict = Callable[[Machine], float]
"""How long an operation takes on a machine."""

_Case = tuple[_Predict, float]
"""And what was measured."""


def cells_to_fit(ranks: int, sizes: Sequence[int] = _SIZES, names: Iterable[str] = COLLECTIVES) -> list[Cell]:
    """Return the operations to time with so many ranks: all collectives, each of a few sizes."""
    sizes = [nbytes for nbytes in sizes if nbytes * ranks * ranks <= _MAX_BYTES]
    return [
        Cell(name, "float32", nbytes)
        for name in names
        for nbytes in ([0] if COLLECTIVES[name].input is None else sizes)
    ]


def fit_host(host: HostCalibration, measured: Mapping[int, Mapping[Operation, float]]) -> HostCalibration:
    """Return a host's calibration with what the seconds of operations tell, by the number of ranks."""
    by_ranks = sorted(measured.items())
    predictors = [_predictors(Machine(1, ranks, host), found) for ranks, found in by_ranks]
    for (ranks, found), predict in zip(by_ranks, predictors, strict=True):
        host = fit_operations(host, ranks, found, predict)
    factors = [
        fit_factors(Machine(1, ranks, host), found, predict)
        for (ranks, found), predict in zip(by_ranks, predictors, strict=True)
    ]
    return replace(host, operations=tuple(itertools.chain(*factors)))


def _predictors(machine: Machine, operations: Iterable[Operation]) -> dict[Operation, _Predict]:
    """Return how to predict each operation, which is recorded here, on machines of as many ranks."""
    return {operation: steady_state(operation, machine) for operation in operations}


def fit_operations(
    host: HostCalibration,
    ranks: int,
    measured: Mapping[Operation, float],
    predictors: Mapping[Operation, _Predict] | None = None,
) -> HostCalibration:
    """Return a host's calibration with what the seconds of operations of so many ranks tell besides."""
    if predictors is None:
        predictors = _predictors(Machine(1, ranks, host), measured)
    cases: defaultdict[int, list[_Case]] = defaultdict(list)
    for operation, seconds in measured.items():
        nbytes = max(operation.nbytes, _SMALL_BYTES)
        if operation.name not in (_SMALL if nbytes == _SMALL_BYTES else _LARGE):
            continue
        cases[nbytes].append((predictors[operation], seconds))
    small = cases.pop(_SMALL_BYTES)
    switch_s, calls = host.switch_s, 1.0
    for _ in range(_ROUNDS):
        if ranks > host.cores:
            switch_s = _fitted_switch_s(host, ranks, calls, small)
        calls = _fitted_factor(partial(_machine, host, ranks, switch_s), small)
    work = tuple(
        Slowdown(ranks, nbytes, _fitted_factor(partial(_machine, host, ranks, switch_s, calls), of_a_size))
        for nbytes, of_a_size in sorted(cases.items())
    )
    return replace(
        host,
        switches=(*host.switches, *([SwitchTime(ranks, switch_s)] if ranks > host.cores else [])),
        call_slowdowns=(*host.call_slowdowns, Slowdown(ranks, _SMALL_BYTES, calls)),
        work_slowdowns=(*host.work_slowdowns, *work),
    )


def fit_link_operations(
    host: HostCalibration, link: LinkCalibration, measured: Mapping[int, Mapping[Operation, float]]
) -> LinkCalibration:
    """Return a link's calibration with what operations of two hosts tell, by the ranks on each.

    Args:
        host: has the costs of operations over several hosts, which were measured with the link.
    """
    factors = [fit_factors(Machine(2, ranks, host, link), found) for ranks, found in measured.items()]
    return replace(link, operations=tuple(itertools.chain(*factors)))


def fit_factors(
    machine: Machine,
    measured: Mapping[Operation, float],
    predictors: Mapping[Operation, _Predict] | None = None,
) -> list[OperationFactor]:
    """Return how many times as long operations took on a machine as is predicted of their parts."""
    if predictors is None:
        predictors = _predictors(machine, measured)
    return [
        OperationFactor(
            operation.name,
            machine.ranks_per_host,
            operation.nbytes,
            seconds / predictors[operation](machine),
        )
        for operation, seconds in measured.items()
    ]


def _machine(
    host: HostCalibration, ranks: int, switch_s: float, calls: float = 1.0, work: float = 1.0
) -> Machine:
    """Return a host with such numbers, whatever has been fitted for other numbers of ranks."""
    changed = replace(
        host,
        switch_s=switch_s,
        switches=(),
        call_slowdowns=(Slowdown(ranks, _SMALL_BYTES, calls),),
        work_slowdowns=(Slowdown(ranks, _SMALL_BYTES, work),),
    )
    return Machine(1, ranks, changed)


def _fitted_switch_s(host: HostCalibration, ranks: int, calls: float, cases: Sequence[_Case]) -> float:
    def misfit(switch_s: float) -> float:
        machine = _machine(host, ranks, switch_s, calls)
        return sum(_error(predict(machine), seconds) for predict, seconds in cases)

    return min((host.switch_s * factor for factor in _SWITCHES), key=misfit)


def _fitted_factor(machine_of: Callable[[float], Machine], cases: Sequence[_Case]) -> float:
    """Return the factor that fits best; what an operation takes grows with it in a line."""
    lines = []
    for predict, seconds in cases:
        once, twice = predict(machine_of(1.0)), predict(machine_of(2.0))
        lines.append((once, twice - once, seconds))

    def misfit(factor: float) -> float:
        return sum(_error(once + (factor - 1) * more, seconds) for once, more, seconds in lines)

    return min(_FACTORS, key=misfit)


def _error(predicted: float, measured: float) -> float:
    return abs(math.log(max(predicted, 1e-12) / measured))
