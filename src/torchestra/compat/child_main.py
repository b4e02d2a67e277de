"""The stand-in for a renamed program's main module in the processes that it starts (running.py)."""

from __future__ import annotations

from torchestra.compat.running import run_in_child

if __name__ == "__mp_main__":
    run_in_child(globals())
