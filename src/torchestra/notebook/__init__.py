"""Ranks in a notebook: ``%load_ext torchestra.notebook``, then cells that begin with ``%%ranks 4``.

The ranks are processes that stay from cell to cell, with their variables. IPython calls ``magics.py``;
``session.py`` runs in the notebook and drives the ranks, ``cells.py`` runs on each rank, ``live_view.py``
shows what they do. For a single function :func:`torchestra.launch` is enough, also if a cell defines it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Offer the magics; IPython calls this for ``%load_ext torchestra.notebook``."""
    from torchestra.notebook.magics import RanksMagics

    shell.register_magics(RanksMagics(shell))


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks and the view; IPython calls this for ``%unload_ext``, and before it loads us again."""
    magics = shell.magics_manager.registry.get("RanksMagics")
    if magics is not None:
        magics.close()
