"""A page that shows a trace by itself: one file, nothing loaded from anywhere."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from torchestra.engine.recorder.trace import replacing

__all__ = ["write_page"]

_PLACE = "/*TRACE*/null"


def write_page(path: str | Path, trace: dict[str, Any]) -> None:
    """Write the page with the trace in it, all of it or nothing."""
    template = resources.files("torchestra.monitor").joinpath("viewer.html").read_text(encoding="utf-8")
    # Inside a script element, no text may end it.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    with replacing(path) as file:
        file.write(template.replace(_PLACE, data))
