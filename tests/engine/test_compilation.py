"""What is kept of compiled kernels between runs, and when it is thrown away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from torchestra.engine import compilation
from torchestra.engine.kernels import catalogue


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
    names = {function.py_func.__name__ for function in catalogue._compiled_functions()}
    assert names >= {"meet", "wait_until", "publish", "buffer_of", "all_reduce", "exchange", "barrier"}
