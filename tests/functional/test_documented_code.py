"""The code on the pages about functional collectives and meshes runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchestra as dist

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["functional.md", "mesh.md"])
def test_code_on_the_page_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    torch.compiler.reset()
    dist.init_process_group("fake", rank=2, world_size=4)
    try:
        names: dict[str, object] = {}
        for block in blocks:
            exec(compile(block, page, "exec"), names)
        if "shape" in names:
            assert names["shape"] == (4096, 8)
    finally:
        dist.destroy_process_group()
