"""Every attack of tools/attack.py, for a moment: nothing gets through or ends, and the job is served."""

from __future__ import annotations

import logging

import pytest
from tools import attacks

from torchestra.store import rate_limited
from torchestra.store.rate_limited import RateLimitedWarnings

SECONDS = 0.5


@pytest.mark.parametrize("name", attacks.names())
def test_an_attack_gets_nothing_and_ends_nothing(name: str) -> None:
    attack = attacks.load(name)
    if reason := attacks.hindrance(attack):
        pytest.skip(reason)
    outcome = attack.attack(SECONDS)
    assert outcome.broken == []
    assert outcome.tried.total() > 0


def test_many_warnings_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(rate_limited.time, "monotonic", lambda: now[0])
    warnings = RateLimitedWarnings(logging.getLogger("torchestra.test"))
    for number in range(1000):
        warnings.warn("refused %s", number)
    now[0] += 61
    warnings.warn("refused %s", "another")
    now[0] += 61
    warnings.warn("refused %s", "the last")
    assert [record.getMessage() for record in caplog.records] == [
        "refused 0",
        "refused another (999 more such warnings since the last one)",
        "refused the last",
    ]
