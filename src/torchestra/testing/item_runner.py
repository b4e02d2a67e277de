"""Run one pytest test in a process rank, with pytest's own machinery, and return its outcome."""

from __future__ import annotations

import contextlib
import copyreg
import os
import pdb  # noqa: T100, what --pdb asks for
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from _pytest.tmpdir import tmppath_result_key

from torchestra.errors import GroupAbortedError
from torchestra.interop.rank_world import join_as_process, leave, prepare_process
from torchestra.interop.world_names import TORCH_WORLDS
from torchestra.testing.item_outcome import note, report_of_error
from torchestra.testing.marker import mark_as_rank
from torchestra.testing.outcomes import Outcome, RankFailure

_PYTEST_OUTCOMES: dict[str, type[BaseException]] = {
    "skip": pytest.skip.Exception,
    "xfail": pytest.xfail.Exception,
    "fail": pytest.fail.Exception,
}


def _rebuilt(name: str, message: str) -> BaseException:
    return _PYTEST_OUTCOMES[name](message)


def _reduced(error: BaseException) -> tuple[Callable[[str, str], BaseException], tuple[str, str]]:
    name = next(name for name, cls in _PYTEST_OUTCOMES.items() if type(error) is cls)
    return _rebuilt, (name, str(error))


# pickle does not find these classes by their names.
for _class in _PYTEST_OUTCOMES.values():
    copyreg.pickle(_class, _reduced)


@dataclass
class ItemRequest:
    """A request to the server of process ranks to run a test.

    Attributes:
        size, world, timeout, init, may_die: as in the marker.
        directory: the directory of the ranks' store and output.
        values: the pickled values of the fixtures that the world shares, by name.
        debug_rank: the rank whose failure opens a debugger, or None.
    """

    nodeid: str
    size: int
    world: str
    timeout: float
    init: bool
    may_die: tuple[int, ...]
    directory: str
    values: dict[str, bytes]
    environment: dict[str, str] = field(repr=False)  # may have the job's secret
    debug: bool
    debug_rank: int | None

    def output_of(self, rank: int) -> str:
        """Return the file that a rank's output goes to."""
        return os.path.join(self.directory, f"rank-{rank}.out")

    def stack_of(self, rank: int) -> str:
        """Return the file that a rank writes its stack to on request."""
        return os.path.join(self.directory, f"rank-{rank}.stack")


def run_item(
    item: pytest.Function, rank: int, request: ItemRequest, tell: Callable[[str, object], object]
) -> Outcome:
    """Set up, run and tear down a test on this rank.

    Args:
        tell: called with ``"raised"``, the error in one line, and whether it is only that another rank was
            gone, as soon as there is one, because the report may take long; with ``"debugging"`` and whether
            a debugger has the terminal now.
    """
    mark_as_rank(item.config)
    _set_environment(request, rank)
    torch.set_num_threads(1)
    state = item.session._setupstate
    item._initrequest()
    _provide_shared_values(item, request)
    # The teardown of pytest's tmp_path reads this to decide whether to keep the directory.
    item.stash.setdefault(tmppath_result_key, {})["call"] = False
    try:
        try:
            prepare_process(request.world)
            if request.init:
                join_as_process(request.world, rank, request.size, request.timeout, request.directory)
            state.setup(item)
            item.runtest()
            item.stash[tmppath_result_key]["call"] = True
        except BaseException as error:
            text = "".join(traceback.format_exception_only(type(error), error))
            tell("raised", (text, isinstance(error, GroupAbortedError)))
            with contextlib.suppress(Exception):  # the test's own error is the one to report
                state.teardown_exact(None)
            raise
        state.teardown_exact(None)
        leave(request.world)
    except BaseException as error:
        # Before anything else: the other ranks wait for this one.
        with contextlib.suppress(Exception):
            leave(request.world)
        outcome = _outcome(item, rank, request, error)
        if request.debug and request.debug_rank in (None, rank) and not outcome.consequence:
            _debug(error, tell)
        return outcome
    return Outcome(rank)


def _set_environment(request: ItemRequest, rank: int) -> None:
    """Make the environment what the request says; write only what differs, as a few of its variables do."""
    size = str(request.size)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    wanted, present = {**request.environment, **place}, dict(os.environ)
    for name in present.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if present.get(name) != value})


def _provide_shared_values(item: pytest.Function, request: ItemRequest) -> None:
    """Give the fixtures that the world shares the values made by the pytest process."""
    for name, pickled in request.values.items():
        definition = item._fixtureinfo.name2fixturedefs[name][-1]
        value = pickle.loads(pickled)
        object.__setattr__(definition, "func", lambda value=value: value)
        object.__setattr__(definition, "argnames", ())


def _outcome(item: pytest.Function, rank: int, request: ItemRequest, error: BaseException) -> Outcome:
    """Return the outcome of a rank that raised ``error``, in a form that can be pickled."""
    report: object
    try:
        note(item, error, f"on rank {rank} of {request.size} processes")
        if request.init and request.world in TORCH_WORLDS and "process group twice" in str(error):
            note(item, error, "the test began in the default group: ranks(..., init=False) leaves that to it")
        report = report_of_error(item, error)
        pickle.loads(pickle.dumps(report))
    except Exception:
        report = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RankFailure(f"{type(error).__name__}: {error}")
    return Outcome(rank, error, str(report), report=report)


def _debug(error: BaseException, tell: Callable[[str, object], object]) -> None:
    """Open a debugger on the terminal where the error was raised."""
    try:
        terminal = open("/dev/tty", "r+b", buffering=0)  # noqa: SIM115
    except OSError:
        print("--pdb: this process has no terminal", file=sys.stderr)
        return
    tell("debugging", True)
    reader, writer = open(terminal.fileno(), closefd=False), open(terminal.fileno(), "w", closefd=False)  # noqa: SIM115
    try:
        debugger = pdb.Pdb(stdin=reader, stdout=writer)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
    finally:
        writer.flush()
        terminal.close()
        tell("debugging", False)
