"""New memory that a large state is received into is in huge pages, where the system has any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchestra.elastic.fetching import new_tensor

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages"
)


def flags_at(address: int) -> set[str]:
    """Return the flags of the mapping with an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_large_tensor_to_receive_into_is_in_huge_pages() -> None:
    tensor = new_tensor((64 << 20,), torch.uint8, "cpu")
    assert "hg" in flags_at(tensor.data_ptr() + tensor.nbytes // 2)


def test_a_tensor_of_another_size_and_type_can_be_written_to_its_ends() -> None:
    tensor = new_tensor(((5 << 20) + 3,), torch.int16, "cpu")
    assert tensor.fill_(7).sum() == 7 * tensor.numel()
