"""How machine code reads tensors is found out by samples, whatever the program has turned on meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torchestra.engine.entries import tensor_access
from worlds import guard_absent_devices


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_samples_are_real_where_the_program_makes_others(mode: Any) -> None:
    """What is found lasts for the process, which would do without entries for good."""
    guard_absent_devices()
    if (why := tensor_access.why_not()) != "":
        pytest.skip(why)
    words = tensor_access.dtype_word(torch.float16)
    find, find_word = tensor_access._found.__wrapped__, tensor_access.dtype_word.__wrapped__
    on: AbstractContextManager[Any] = mode()
    with on:
        assert find()[1] == ""
        assert find_word(torch.float16) == words != 0
        assert torch.ones(1).is_meta or isinstance(torch.ones(1), torch._subclasses.FakeTensor)
