"""The pytest plugin: ``@pytest.mark.ranks(4)`` runs a plain test function on four ranks.

::

    @pytest.mark.ranks(4)                              # as threads
    @pytest.mark.ranks(2, 4, kind="processes")         # once on two, once on four processes
    @pytest.mark.ranks(2, kind=("threads", "processes"), timeout=10)
    @pytest.mark.ranks(4, world="torch")               # in torch.distributed's default group

Every rank is in a default group when its fixtures are made and when the function is called. The first rank to
fail fails the test, with its own assertion and traceback; the outcomes of the other ranks and the
output of every rank follow. A test that hangs fails when its time is up, and the report says which rank
waits for which.

This module is imported by every run of pytest where torchestra is installed, so it imports neither torch nor
the rest of torchestra before a test needs them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from torchestra.testing.marker import ARGUMENT, MARKER, is_per_rank, report_of, spec_of, specs_of
from torchestra.testing.plain_imports import import_plainly

if TYPE_CHECKING:
    from torchestra.testing.rank_pool import RankPool

import_plainly()

_POOL: pytest.StashKey[RankPool] = pytest.StashKey()


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
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per size and kind, if there are several."""
    specs = specs_of(metafunc.definition)
    if len(specs) > 1:
        metafunc.fixturenames.append(ARGUMENT)
        metafunc.parametrize(ARGUMENT, specs, ids=[spec.label for spec in specs])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the server of process ranks before any test has started a thread."""
    items = {item.nodeid: item for item in session.items if isinstance(item, pytest.Function)}
    specs = [spec for item in items.values() if (spec := spec_of(item)) and spec.kind == "processes"]
    if specs and not session.config.option.collectonly:
        from torchestra.testing.rank_pool import RankPool

        # Made once here; else every rank that needs a temporary directory would make it.
        factory: Any = getattr(session.config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()
        session.config.stash[_POOL] = RankPool(items, sorted({spec.world for spec in specs}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> object | None:
    """Leave a fixture to the ranks if each makes its own value."""
    item = getattr(request, "_pyfuncitem", None)
    if isinstance(item, pytest.Function) and is_per_rank(fixturedef) and spec_of(item) is not None:
        value = _RankOnlyValue(fixturedef.argname)
        fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
        return value
    return None


class _RankOnlyValue:
    """A placeholder for a value that only the ranks have."""

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
        own = report_of(call.excinfo.value)
        if own is not None:
            report.longrepr = own
    return report
