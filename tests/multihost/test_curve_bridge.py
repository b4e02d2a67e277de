"""What a bridge takes from a peer that has proved the secret, whatever that sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchestra.engine.multihost import curve_bridge
from torchestra.engine.multihost.bridge import BridgeError
from torchestra.engine.multihost.curve_bridge import CurveBridge
from torchestra.engine.multihost.group_transport import Channel
from torchestra.transport.message import Message

SOON = 20.0


class Transport:
    """Hands its bridge what a test says that rank 1 has sent."""

    rank, link = 0, None

    def listen(self, channel: Channel, arrived: Any, ended: Any, delay: float) -> None:
        self.arrived = arrived


def receive(monkeypatch: pytest.MonkeyPatch, text: bytes, parts: list[bytes], lost: Any = None) -> bytes:
    """Return what a tensor of 8 bytes has when a message has come."""
    monkeypatch.setattr(curve_bridge, "meet", lambda *arguments: None)
    transport: Any = Transport()
    store: Any = SimpleNamespace(secret=b"secret", clone=lambda: store)
    monkeypatch.setattr(curve_bridge, "PrefixStore", lambda prefix, store: store)
    bridge = CurveBridge(store, transport, [0, 1], ["rank 0 on host A", "rank 1 on host B"], SOON)
    storages = [torch.tensor(list(part), dtype=torch.uint8).untyped_storage() for part in parts]
    tensor = torch.zeros(8, dtype=torch.uint8)
    pending = bridge.begin([(1, tensor)], [], SOON)
    transport.arrived(Message(1, Channel.bridge, 0, text, storages, lost))
    try:
        assert pending.wait(SOON)
    finally:
        bridge.close()
    return bytes(tensor.tolist())


@pytest.mark.parametrize(
    ("text", "parts"),
    [(b"abcdefgh", []), (b"", [b"abcdefgh"]), (b"abc", [b"defgh"]), (b"", [b"a", b"bcdefg", b"h"])],
)
def test_the_parts_of_a_message_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, text: bytes, parts: list[bytes]
) -> None:
    assert receive(monkeypatch, text, parts) == b"abcdefgh"


@pytest.mark.parametrize(
    ("text", "parts", "length"), [(b"123456789", [], 9), (b"1", [b"1234", b"5678"], 9), (b"", [], 0)]
)
def test_a_message_of_another_length_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: bytes, parts: list[bytes], length: int
) -> None:
    with pytest.raises(BridgeError, match=f"at most 8 bytes from rank 1 on host B, got {length}$"):
        receive(monkeypatch, text, parts)


def test_a_message_for_which_there_was_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BridgeError, match="no memory here for the 8 bytes"):
        receive(monkeypatch, b"", [], MemoryError("there is no memory here for the 8 bytes"))
