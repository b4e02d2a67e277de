"""PrefixStore sets a part of a store apart."""

from __future__ import annotations

import pytest

from torchestra.errors import InvalidArgumentError
from torchestra.store import HashStore, PrefixStore


def test_prefixes_nest_from_the_outside_in() -> None:
    bottom = HashStore()
    middle = PrefixStore("outer", bottom)
    store = PrefixStore("inner", middle)
    store.set("key", "1")
    assert bottom.list_keys() == ["outer/inner/key"]
    assert store.underlying_store is middle
    assert middle.underlying_store is bottom
    assert repr(store) == "PrefixStore('inner', PrefixStore('outer', HashStore))"


def test_prefixes_do_not_see_each_other() -> None:
    bottom = HashStore()
    one, other = PrefixStore("one", bottom), PrefixStore("one more", bottom)
    one.set("key", "1")
    other.set("key", "2")
    bottom.set("key", "3")
    assert (one.get("key"), other.get("key")) == (b"1", b"2")
    assert one.list_keys() == ["key"]
    assert one.num_keys() == 1
    assert bottom.num_keys() == 3


def test_a_prefix_needs_a_store_under_it() -> None:
    with pytest.raises(InvalidArgumentError, match="PrefixStore: `store` must be a Store, got"):
        PrefixStore("p", {})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="`prefix` must be a str"):
        PrefixStore(HashStore(), "p")  # type: ignore[arg-type]
