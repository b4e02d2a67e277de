"""By what processes recognise each other in a store."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from torchestra.store import process
from torchestra.store.process import ProcessIdentity


def test_a_process_of_another_time_namespace_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc tells each time namespace another start of the same process."""
    read_link, own = os.readlink, ProcessIdentity.current()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(
            os, "readlink", lambda path: "time:[1]" if path.endswith("/time") else read_link(path)
        )
        process._forget()
        there = replace(ProcessIdentity.current(), started=own.started + 100)
    process._forget()
    assert not there.is_dead()
    assert not there.is_alive()
    assert replace(own, started=own.started + 100).is_dead()
