"""Which kernels no case runs, though what they do is seen by other ranks or threads."""

from __future__ import annotations

import importlib
import pkgutil

import torchestra.engine
from torchestra.engine.native.declarations import KernelSource
from verification.cases import CASES, library

NOT_SEARCHED = {
    "entries.": "decide whether a call is plain, and call a kernel that is searched",
    "kernels.placement.": "say where ranks run; no wait depends on it",
    "kernels.shared_words.next_reader": "after an operation was left halfway; tested with threads",
    "kernels.shared_words.": "single accesses and steps for Python, whose protocols are searched with models",
    "p2p.endpoint_kernels.abandon": "one store, of what is searched as read",
    "p2p.kernels.post": "what a call does that is searched, without the wait",
    "recorder.message_records.": "entries of messages between hosts, written as those that are searched",
    "recorder.recorder.open_multihost_entry": "an entry as those that are searched",
    "recorder.recorder.close_multihost_entry": "an entry as those that are searched",
    "recorder.recorder.end_wait_elsewhere": "a wait as those that are searched",
    "recorder.recorder.fail_entry": "an entry as those that are searched",
    "recorder.recorder.read_ring": "reads entries, each as is searched",
    "recorder.spans.": "entries of phases, written as those of operations",
}
"""By the beginning of their names: kernels that no case runs, and why."""


def unsearched() -> list[str]:
    """Return the names of kernels that reach what others see, that no case runs, and that are not excused."""
    run: set[str] = set()
    for case in CASES:
        kernels = case.kernels()
        kernels.program(case.driver)
        run |= kernels.programs
    models = library()
    found = set()
    for module in pkgutil.walk_packages(torchestra.engine.__path__, "torchestra.engine."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, KernelSource) and value.name not in run and models.stops(value):
                found.add(value.name)
    return sorted(name for name in found if not name.startswith(tuple(NOT_SEARCHED)))
