"""The marker ``ranks``, and the tests and fixtures that it concerns. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from torchestra.interop.world_names import TORCH, TORCH_ON_GLOO, TORCHESTRA
from torchestra.testing.fixtures import is_shared_by_the_world

MARKER = (
    "ranks(*sizes, world='torchestra', kind=..., timeout=30, init=True, may_die=(), backend=...): run the"
    " test on so many ranks. They are in the default group of torchestra, as threads by default, or with"
    " world='torch' in that of torch.distributed, as processes by default; kind is 'threads', 'processes' or"
    " both in turn."
    " Operations may wait for timeout seconds, and the whole test may take a quarter more. Without init the"
    " ranks join no group by themselves. It is no failure if ranks in may_die are killed. With"
    " backend='gloo' and world='torch' they are on Gloo itself, to compare"
)
ARGUMENT = "ranks_of_this_run"
"""The name of the parameter that tells apart the several ways of running one test."""
_KINDS = ("threads", "processes")
_PER_RANK_BUILTINS = ("monkeypatch",)
_IN_RANK = pytest.StashKey[bool]()
_REPORT = "_torchestra_report"


@dataclass(frozen=True)
class RanksSpec:
    """One way of running a test on ranks.

    Attributes:
        world: the library whose default group they are in: ``"torchestra"``, or ``"torch"``; without
            torchestra's engine ``"torch on gloo"``.
        kind: ``"threads"`` or ``"processes"``.
        timeout: how many seconds an operation may wait.
        init: whether the ranks are in a default group from the start.
        may_die: the ranks that may be killed without failing the test.
    """

    size: int
    world: str
    kind: str
    timeout: float
    init: bool
    may_die: tuple[int, ...] = ()

    @property
    def limit(self) -> float:
        """Return the time limit of the whole test in seconds; the engine reports a hang before that."""
        return 1.25 * self.timeout + 2.0

    @property
    def label(self) -> str:
        """Return the label in the test's name."""
        return f"{self.size}-{self.kind}"


def specs_of(node: pytest.Item | pytest.Function | Any) -> list[RanksSpec]:
    """Return the ways of running that a test's marker asks for; an empty list without a marker.

    Raises:
        pytest.UsageError: the marker's arguments make no sense.
    """
    mark = node.get_closest_marker("ranks")
    return [] if mark is None else _specs(mark.args, **mark.kwargs)


def _specs(
    sizes: Sequence[Any],
    world: str = TORCHESTRA,
    kind: str | Sequence[str] | None = None,
    timeout: float = 30.0,
    init: bool = True,
    may_die: Sequence[int] = (),
    backend: str = TORCHESTRA,
    **unknown: Any,
) -> list[RanksSpec]:
    if kind is None:  # a program for torch.distributed expects a process of its own
        kind = "processes" if world == TORCH else "threads"
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    if unknown:
        raise pytest.UsageError(
            f"ranks: unknown arguments {', '.join(unknown)}; there are world, kind, timeout, init, may_die,"
            " backend"
        )
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(f"ranks: say how many, as in ranks(4) or ranks(2, 4); got {sizes!r}")
    if not kinds or not all(each in _KINDS for each in kinds):
        raise pytest.UsageError(f"ranks: kind must be 'threads', 'processes' or both, got {kind!r}")
    if world not in (TORCHESTRA, TORCH):
        raise pytest.UsageError(f"ranks: world must be {TORCHESTRA!r} or {TORCH!r}, got {world!r}")
    if world == TORCH and not init and "threads" in kinds:
        raise pytest.UsageError(
            "ranks: with world='torch' and init=False ranks find each other by environment variables, which"
            " threads share: use kind='processes'"
        )
    if backend not in (TORCHESTRA, "gloo") or (backend == "gloo" and (world != TORCH or "threads" in kinds)):
        raise pytest.UsageError(
            f"ranks: backend={backend!r}: 'gloo' runs world='torch' on Gloo itself, on processes; leave it"
            " out for torchestra"
        )
    if backend == "gloo":
        world = TORCH_ON_GLOO
    return [
        RanksSpec(size, world, each, float(timeout), init, tuple(may_die)) for each in kinds for size in sizes
    ]


def spec_of(item: pytest.Function) -> RanksSpec | None:
    """Return how to run a test, or None if it is not a test on ranks (or this process is a rank)."""
    if item.config.stash.get(_IN_RANK, False):
        return None
    callspec = getattr(item, "callspec", None)
    spec: RanksSpec | None = callspec.params.get(ARGUMENT) if callspec is not None else None
    if spec is None:
        specs = specs_of(item)
        spec = specs[0] if specs else None
    return spec


def is_per_rank(fixturedef: pytest.FixtureDef[Any]) -> bool:
    """Return whether every rank makes its own value of a fixture.

    It does not for wider scopes, for ``scope="world"``, and for pytest's own fixtures except monkeypatch: of
    these (capsys, caplog, …) there is one per process.
    """
    function: Any = fixturedef.func
    module = getattr(function, "__module__", "") or ""
    if fixturedef.scope != "function" or is_shared_by_the_world(function):
        return False
    if module.startswith("_pytest."):
        return fixturedef.argname in _PER_RANK_BUILTINS or "xunit" in fixturedef.argname
    return True


def show_as(error: BaseException, report: object) -> None:
    """Set the report of a test that fails with ``error``: a text or one of pytest's report objects."""
    setattr(error, _REPORT, report)


def report_of(error: BaseException) -> Any:
    """Return the report given to :func:`show_as`, if any."""
    return getattr(error, _REPORT, None)


def mark_as_rank(config: pytest.Config) -> None:
    """Note that this process is a rank: tests and fixtures run here in the ordinary way."""
    config.stash[_IN_RANK] = True
