"""Test that a stranger's values in torch's store are not believed where the job has a secret."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra.errors import DistStoreError
from torchestra.store import PrefixStore
from torchestra.store.authenticated_values import UnauthenticatedValueError, open_pieces, prove
from torchestra.store.torch_agent import TorchStore

SECRET = b"between us"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3), st.binary(max_size=80), st.integers(0, 300))
def test_pieces_are_what_was_written_and_nothing_else(pieces: list[bytes], rubbish: bytes, cut: int) -> None:
    value = b"".join(prove(SECRET, "key", piece) for piece in pieces)
    assert open_pieces(SECRET, "key", value) == (b"".join(pieces) if pieces else None)
    for wrong in (value + rubbish, rubbish + value, value[:cut]):
        assert open_pieces(SECRET, "key", wrong) in (None, *(b"".join(pieces[:n]) for n in range(4)))
    if pieces:
        assert open_pieces(b"another", "key", value) is None
        assert open_pieces(SECRET, "kez", value) is None


def test_what_a_stranger_writes_is_refused_and_what_ranks_write_is_read() -> None:
    torchs = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))
    store, stranger = PrefixStore("group", TorchStore(torchs, proves=SECRET)), TorchStore(torchs)
    store.set("place", b"here")
    store.append("said", b"one ")
    store.append("said", b"two")
    assert (store.get("place"), store.get("said")) == (b"here", b"one two")
    assert store.compare_set("place", b"here", b"there") == b"there"
    with pytest.raises(DistStoreError, match="this one has none; set TORCHESTRA_SECRET"):
        stranger.get("group/place")
    for forged in (b"here", b"", b"\0torchestra\0", prove(b"guessed", "group/place", b"here")):
        torchs.set("group/place", forged)
        with pytest.raises(UnauthenticatedValueError, match="'group/place' was written by somebody who"):
            store.get("place")
        with pytest.raises(UnauthenticatedValueError):
            store.compare_set("place", b"there", b"mine")
    torchs.set("group/place", torchs.get("group/said"))  # right, but under another key
    with pytest.raises(UnauthenticatedValueError):
        store.get("place")
    assert (store.add("count", 3), store.add("count", -1), store.get("count")) == (3, 2, b"2")
