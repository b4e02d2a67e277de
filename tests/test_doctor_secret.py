"""``torchestra doctor`` says whether there is a secret, without saying which."""

from __future__ import annotations

import pytest

from torchestra.monitor.doctor import examine
from torchestra.store.tcp import locality


def found(subject: str) -> tuple[str, str]:
    (finding,) = [finding for finding in examine() if finding.subject == subject]
    return finding.found, finding.remark


def test_whether_a_secret_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)
    assert found("secret")[0].startswith("TORCHESTRA_SECRET is not set")
    monkeypatch.setenv("TORCHESTRA_SECRET", "0123456789abcdef" * 4)
    assert found("secret") == ("TORCHESTRA_SECRET is set, 64 bytes", "")
    monkeypatch.setenv("TORCHESTRA_SECRET", "hunter2")
    said, remark = found("secret")
    assert "hunter2" not in said
    assert "can be guessed" in remark


def test_whether_the_kernel_tells_users_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "_owner", lambda *_: None)
    assert found("users of connections") == ("no", "without a secret, other users of this host may join")
