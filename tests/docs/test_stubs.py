"""The stubs of derived methods say what the methods are; if not, run ``python -m tools.stubs``."""

from __future__ import annotations

from tools.stubs import stubs


def test_the_stubs_are_current() -> None:
    for path, text in stubs().items():
        assert path.read_text() == text, "run: python -m tools.stubs"
