"""What is kept of compiled kernels between runs, and when it is thrown away."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from types import FrameType, SimpleNamespace

import numba
import pytest

from torchestra.engine import kernel_registry
from torchestra.engine.native import compilation


def test_kernels_are_compiled_anew_when_any_file_of_the_engine_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba itself looks only at the file of the function, not at those of the functions that it calls. Nor
    is a user with another home directory a reason to compile anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels, reductions = tmp_path / "move.barrier-1.py311.nbi", tmp_path / "reductions._make-1.py311.nbi"
    function = SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path)))
    uncached = SimpleNamespace(stats=SimpleNamespace(cache_path=None))

    def is_kept(sources: str) -> bool:
        monkeypatch.setattr(compilation, "_sources", lambda: sources)
        kernels.touch()
        reductions.touch()
        compilation.forget_what_is_stale([function, uncached])
        assert reductions.exists()
        return kernels.exists()

    assert not is_kept("first")
    assert is_kept("first")
    assert not is_kept("second")
    assert is_kept("second")
    assert not is_kept("first")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another home"))
    assert is_kept("first")


def test_the_functions_that_kernels_are_made_of_are_known() -> None:
    names = {function.py_func.__name__ for function in kernel_registry._compiled_functions()}
    assert names >= {"meet", "wait_until", "publish", "buffer_of", "all_reduce", "exchange", "barrier"}


# A handler that raises in the midst of Thread.start() has the thread end at once, and threading complain; one
# that raises in the callback of a weak reference gets no further, and Python complains.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_signal_ends_the_wait_for_a_compilation_and_not_the_compilation() -> None:
    """Half of a compilation would make every later one of the process fail: compiled without protection,
    some of these functions are broken for good."""

    class SignalledError(Exception):
        pass

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise SignalledError

    def compiled(number: int) -> int:
        inner = numba.njit(lambda value: value + number)
        outer = numba.njit(lambda value: inner(value) * 2)
        return int(outer(1))

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for number, delay in enumerate(itertools.islice(itertools.cycle((0.004, 0.02, 0.05)), 12)):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                assert compilation.undisturbed(lambda number=number: compiled(number)) == (1 + number) * 2
                signal.setitimer(signal.ITIMER_REAL, 0)
            except SignalledError:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted
    assert compilation.undisturbed(lambda: compiled(-1)) == 0


def test_what_a_compilation_raises_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        compilation.undisturbed(lambda: 1 // 0)
