"""Test what tells hosts apart before anybody has tried."""

from __future__ import annotations

import pytest

from torchestra.engine.multihost.host_id import HOST_VARIABLE, certain_host_id, host_id, host_name
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank


def test_one_process_has_one_host() -> None:
    assert host_id() == host_id()
    assert certain_host_id() in ("", host_id())


def test_the_variable_overrides_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    natural = host_id()
    monkeypatch.setenv(HOST_VARIABLE, "left")
    assert (host_id(), host_name()) == ("left", "left")
    assert certain_host_id() == ""
    monkeypatch.delenv(HOST_VARIABLE)
    assert host_id() == natural


def test_a_thread_rank_may_pretend_to_be_elsewhere() -> None:
    natural = host_id()
    with thread_rank(0, 1, HashStore(), host="elsewhere"):
        assert (host_id(), host_name()) == ("elsewhere", "elsewhere")
    assert host_id() == natural
