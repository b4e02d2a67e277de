"""Looking at frames of other threads runs no finaliser meanwhile."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

import pytest

from torchestra.engine.diagnosis import lock_waits, program
from torchestra.engine.diagnosis.program import describe_programs
from torchestra.engine.recorder import callsites
from torchestra.engine.recorder.callsites import call_site
from torchestra.launcher import threads
from torchestra.system import thread_frames


def test_nothing_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finaliser that let go of the interpreter's lock there stopped the process for ever."""
    collects: list[bool] = []
    real = sys._current_frames, sys._current_exceptions
    for name, look in zip(("_current_frames", "_current_exceptions"), real, strict=True):
        monkeypatch.setattr(sys, name, lambda look=look: (collects.append(gc.isenabled()), look())[1])
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, daemon=True)
    other.start()
    call_site(other.ident)
    describe_programs([other])
    ended.set()
    other.join()
    assert len(collects) >= 4
    assert not any(collects)


def test_nothing_is_collected_while_frames_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11 a finaliser that let go of the interpreter's lock there crashed the process."""
    collects: list[bool] = []

    def look(frame: object) -> bool:
        collects.append(gc.isenabled())
        return False

    for module in (callsites, program, lock_waits):
        monkeypatch.setattr(module, "is_of_the_program", look)
    monkeypatch.setattr(threads.traceback, "extract_stack", look)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, daemon=True)
    other.start()
    for walk in (lambda: call_site(other.ident), lambda: describe_programs([other])):
        walk()
        assert collects
        assert not any(collects)
        collects.clear()
    ranks = threads.ThreadRanks(1, lambda rank: ended.wait())
    ranks.ranks[0].frames()
    ended.set()
    assert ranks.join(60.0, 1.0)
    other.join()
    assert collects == [False]


def test_collections_are_as_before_afterwards() -> None:
    with thread_frames._looking:  # threads of other tests look now and then
        assert threading.get_ident() in thread_frames.current_frames()
        assert gc.isenabled()
        gc.disable()
        try:
            assert threading.get_ident() in thread_frames.current_frames()
            assert not gc.isenabled()
        finally:
            gc.enable()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads of other tests
def test_a_child_that_is_forked_meanwhile_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would never collect again: the thread that looked does not exist there."""
    children: list[int] = []

    def fork() -> dict[int, FrameType]:
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(0 if gc.isenabled() else 1)
        return {}

    monkeypatch.setattr(sys, "_current_frames", fork)
    thread_frames.current_frames()
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 0
