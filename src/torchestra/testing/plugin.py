"""The pytest plugin: ``@pytest.mark.ranks(4)`` runs a plain test function on four ranks.

::

    @pytest.mark.ranks(4)                              # as threads
    @pytest.mark.ranks(2, 4, kind="processes")         # once on two, once on four processes
    @pytest.mark.ranks(2, kind=("threads", "processes"), timeout=10)

Every rank is in a default group when its fixtures are made and when the function is called. The first rank to
fail fails the test, with its own assertion and traceback; what the others did follows, and what every
rank has printed. A test that hangs fails when its time is over, with the report of who waits for whom.

This module is imported by every run of pytest where torchestra is installed, so it imports neither torch nor
the rest of torchestra before a test needs them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchestra.testing.rank_pool import RankPool

if TYPE_CHECKING:
    pass

_MARKER = (
    "ranks(*sizes, kind='threads', timeout=30, init=True, may_die=()): run the test on so many ranks, as"
    " 'threads', 'processes' or both in turn; operations may wait for timeout seconds, and the whole test may"
    " take a quarter more; without init the ranks join no group by themselves; it is no failure if ranks in"
    " may_die are killed"
)
_ARGUMENT = "ranks_of_this_run"
_KINDS = ("threads", "processes")
_PER_RANK_BUILTINS = ("monkeypatch",)
# Set by plugin hooks, read by the modules that run ranks.
_POOL: pytest.StashKey[RankPool] = pytest.StashKey()
_IN_RANK = pytest.StashKey[bool]()
_REPORT = "_torchestra_report"


@dataclass(frozen=True)
class RanksSpec:
    """One way of running a test on ranks.

    Attributes:
        size: how many ranks.
        kind: ``"threads"`` or ``"processes"``.
        timeout: seconds that an operation may wait.
        init: whether the ranks are in a default group from the beginning.
        may_die: the ranks whose being killed is no failure of the test.
    """

    size: int
    kind: str
    timeout: float
    init: bool
    may_die: tuple[int, ...] = ()

    @property
    def limit(self) -> float:
        """Seconds for the whole test: the engine's report of a hang comes before they are over."""
        return 1.25 * self.timeout + 1.0

    @property
    def label(self) -> str:
        """How it stands in the test's name."""
        return f"{self.size}-{self.kind}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--pdb-rank``."""
    parser.getgroup("torchestra").addoption(
        "--pdb-rank",
        type=int,
        default=None,
        metavar="RANK",
        help="with --pdb: look at this rank's failure, if it has one, instead of at the first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


def specs_of(node: pytest.Item | pytest.Function | Any) -> list[RanksSpec]:
    """The ways of running that a test's marker asks for; none without one.

    Raises:
        pytest.UsageError: the marker's arguments make no sense.
    """
    mark = node.get_closest_marker("ranks")
    return [] if mark is None else _specs(mark.args, **mark.kwargs)


def _specs(
    sizes: Sequence[Any],
    kind: str | Sequence[str] = "threads",
    timeout: float = 30.0,
    init: bool = True,
    may_die: Sequence[int] = (),
    **unknown: Any,
) -> list[RanksSpec]:
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    if unknown:
        raise pytest.UsageError(
            f"ranks: unknown arguments {', '.join(unknown)}; there are kind, timeout, init, may_die"
        )
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(f"ranks: say how many, as in ranks(4) or ranks(2, 4); got {sizes!r}")
    if not kinds or not all(each in _KINDS for each in kinds):
        raise pytest.UsageError(f"ranks: kind must be 'threads', 'processes' or both, got {kind!r}")
    return [RanksSpec(size, each, float(timeout), init, tuple(may_die)) for each in kinds for size in sizes]


def spec_of(item: pytest.Function) -> RanksSpec | None:
    """How a test is to be run, or None if it is no test on ranks (or this is one of the ranks)."""
    if item.config.stash.get(_IN_RANK, False):
        return None
    callspec = getattr(item, "callspec", None)
    chosen: RanksSpec | None = callspec.params.get(_ARGUMENT) if callspec is not None else None
    if chosen is None:
        specs = specs_of(item)
        chosen = specs[0] if specs else None
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per size and kind, where there are several."""
    specs = specs_of(metafunc.definition)
    if len(specs) > 1:
        metafunc.fixturenames.append(_ARGUMENT)
        metafunc.parametrize(_ARGUMENT, specs, ids=[spec.label for spec in specs])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the server of process ranks while no test has started a thread yet."""
    items = {item.nodeid: item for item in session.items if isinstance(item, pytest.Function)}
    wanted = (spec_of(item) for item in items.values())
    if not session.config.option.collectonly and any(spec and spec.kind == "processes" for spec in wanted):
        from torchestra.testing.rank_pool import RankPool

        # Made here once, or every rank that wants a temporary directory would make it.
        factory: Any = getattr(session.config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()
        session.config.stash[_POOL] = RankPool(items)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> object | None:
    """Leave a fixture to the ranks where each makes its own."""
    item = getattr(request, "_pyfuncitem", None)
    if isinstance(item, pytest.Function) and is_per_rank(fixturedef) and spec_of(item) is not None:
        value = _LeftToTheRanks(fixturedef.argname)
        fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
        return value
    return None


def is_per_rank(fixturedef: pytest.FixtureDef[Any]) -> bool:
    """Whether every rank makes a value of its own of a fixture.

    Not so for wider scopes, for ``scope="world"``, and for what pytest itself offers (capsys, caplog, …), of
    which there is one per process; but for monkeypatch.
    """
    from torchestra.testing.fixtures import is_shared_by_the_world

    function: Any = fixturedef.func
    module = getattr(function, "__module__", "") or ""
    if fixturedef.scope != "function" or is_shared_by_the_world(function):
        return False
    if module.startswith("_pytest."):
        return fixturedef.argname in _PER_RANK_BUILTINS or "xunit" in fixturedef.argname
    return True


class _LeftToTheRanks:
    """In place of a value that only the ranks have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<fixture {self._name}: every rank has its own>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fixture {self._name!r} is made on the ranks and cannot be used outside of them: give the"
            ' fixture that uses it no wider scope, and not scope="world"'
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a test on its ranks."""
    spec = spec_of(pyfuncitem)
    if spec is None:
        return None
    if spec.kind == "threads":
        from torchestra.testing.thread_items import run_on_threads

        run_on_threads(pyfuncitem, spec)
    else:
        from torchestra.testing.process_items import run_on_processes

        run_on_processes(pyfuncitem, spec, pyfuncitem.config.stash[_POOL])
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failure of a process rank as that rank saw it."""
    report = yield
    if call.excinfo is not None and report.outcome == "failed":
        text = getattr(call.excinfo.value, _REPORT, None)
        if text is not None:
            report.longrepr = text
    return report


def show_as(error: BaseException, text: str) -> None:
    """Let the report of a test that fails with ``error`` be this text."""
    setattr(error, _REPORT, text)


def mark_as_rank(config: pytest.Config) -> None:
    """This process is a rank: tests and fixtures run here in the ordinary way."""
    config.stash[_IN_RANK] = True
