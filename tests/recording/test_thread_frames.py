"""Looking at frames of other threads runs no finaliser while the interpreter holds its lock of threads."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from torchestra.engine.diagnosis.program import describe_programs
from torchestra.engine.recorder.callsites import call_site
from torchestra.system.thread_frames import current_frames


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
    assert gc.isenabled()


def test_collections_that_the_program_has_turned_off_stay_off() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
