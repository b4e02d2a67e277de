"""In a process rank: run one pytest test by pytest's own machinery, and say how it ended."""

from __future__ import annotations

import contextlib
import os
import pdb  # noqa: T100, what --pdb asks for
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.tmpdir import tmppath_result_key

from torchestra.errors import GroupAbortedError
from torchestra.store import FileStore
from torchestra.testing.messages import ItemRequest
from torchestra.testing.outcomes import RankFailure
from torchestra.testing.plugin import mark_as_rank
from torchestra.world.init import destroy_process_group, init_process_group, is_initialized

__all__ = ["ItemResult", "run_item"]


# These cannot be pickled.
_OUTCOMES: dict[str, Callable[[Any], BaseException]] = {
    "skip": pytest.skip.Exception,
    "xfail": pytest.xfail.Exception,
    "fail": pytest.fail.Exception,
}


@dataclass
class ItemResult:
    """How a test ended on a rank.

    Attributes:
        exception: what was raised, pickled; None if nothing was, or it cannot be pickled.
        error: its type and message, or None if nothing was raised.
        text: as pytest shows it.
        consequence: it failed only because another rank was gone.
        by_calling: ``skip``, ``xfail`` or ``fail``, where the test ended itself by that function of pytest's.
    """

    exception: bytes | None = None
    error: str | None = None
    text: str = ""
    consequence: bool = False
    by_calling: str = ""

    def raised(self) -> BaseException:
        """The exception that was raised, or one that says the same."""
        if self.by_calling:
            return _OUTCOMES[self.by_calling](self.error)
        if self.exception is None:
            return RankFailure(self.error)
        error: BaseException = pickle.loads(self.exception)
        return error


def run_item(
    item: pytest.Function, rank: int, request: ItemRequest, debugging: Callable[[bool], object]
) -> ItemResult:
    """Set up, run and tear down a test on this rank.

    Args:
        debugging: told True when a debugger takes over the terminal, and False when it gives it back.
    """
    mark_as_rank(item.config)
    os.environ.clear()
    os.environ.update(request.environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request.size))
    os.environ["LOCAL_WORLD_SIZE"] = str(request.size)
    torch.set_num_threads(1)
    state = item.session._setupstate
    item._initrequest()
    _provide_shared_values(item, request)
    # What pytest's own tmp_path wants to know when it is taken down: whether to keep the directory.
    item.stash.setdefault(tmppath_result_key, {})["call"] = False
    try:
        try:
            if request.init:
                store = FileStore(os.path.join(request.directory, "store"), request.size)
                init_process_group(store=store, rank=rank, world_size=request.size, timeout=request.timeout)
            state.setup(item)
            item.runtest()
            item.stash[tmppath_result_key]["call"] = True
        except BaseException:
            with contextlib.suppress(Exception):  # the test's own error is the one to tell
                state.teardown_exact(None)
            raise
        state.teardown_exact(None)
        if is_initialized():
            destroy_process_group()
    except BaseException as error:
        told = _tell(item, error)
        # Before anything that takes time: the others wait for this rank.
        if is_initialized():
            destroy_process_group()
        if request.debug and request.debug_rank in (None, rank) and not told.consequence:
            _debug(error, debugging)
        return told
    return ItemResult()


def _provide_shared_values(item: pytest.Function, request: ItemRequest) -> None:
    """Let fixtures that the world shares have the values that the pytest process has made."""
    for name, pickled in request.values.items():
        definition = item._fixtureinfo.name2fixturedefs[name][-1]
        value = pickle.loads(pickled)
        object.__setattr__(definition, "func", lambda value=value: value)
        object.__setattr__(definition, "argnames", ())


def _tell(item: pytest.Function, error: BaseException) -> ItemResult:
    info = pytest.ExceptionInfo.from_exception(error)
    try:
        text = str(item.repr_failure(info))
    except Exception:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        exception = pickle.dumps(error)
        pickle.loads(exception)
    except Exception:
        exception = None
    consequence = isinstance(error, GroupAbortedError)
    for name, kind in _OUTCOMES.items():
        if type(error) is kind:
            return ItemResult(None, str(error), text, by_calling=name)
    return ItemResult(exception, f"{type(error).__name__}: {error}", text, consequence)


def _debug(error: BaseException, debugging: Callable[[bool], object]) -> None:
    """Let the user look at where the error was raised, on the terminal."""
    try:
        terminal = open("/dev/tty", "r+b", buffering=0)  # noqa: SIM115
    except OSError:
        print("--pdb: this process has no terminal", file=sys.stderr)
        return
    debugging(True)
    reader, writer = open(terminal.fileno(), closefd=False), open(terminal.fileno(), "w", closefd=False)  # noqa: SIM115
    try:
        debugger = pdb.Pdb(stdin=reader, stdout=writer)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
    finally:
        writer.flush()
        terminal.close()
        debugging(False)
