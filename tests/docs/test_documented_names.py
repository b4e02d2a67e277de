"""The names that "From torch.distributed in five minutes" tells are those that there are."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings

import pytest
import torch.distributed
from pages import ROOT

import torchestra

PAGE = (ROOT / "docs" / "start" / "from-torch-distributed.md").read_text()
BY_MODULE, ONE_BY_ONE = PAGE.split("\n## Names, ")[1:]
ROWS = re.findall(r"^\| `(torch\.[\w.]+)` \| `?(.*?)`? \|$", BY_MODULE, re.MULTILINE)


def names_of_torch() -> set[str]:
    """Return torch.distributed's public functions and classes, and their defaults."""
    found = {"default_pg_timeout"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in dir(torch.distributed):
            value = getattr(torch.distributed, name)
            module = getattr(value, "__module__", None) or ""
            if not (name.startswith("_") or inspect.ismodule(value)):
                found |= {name} if module.startswith(("torch.distributed", "torch._C")) else set()
    return found


def names_in(tables: str) -> set[str]:
    """Return the names in the first column."""
    cells = re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)
    return {name.strip("`") for cell in cells for name in cell.split(", ")}


def resolve(name: str) -> object:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"there is no {name}")


def test_the_same_names_are_those_that_both_have() -> None:
    told = re.findall(r"`(\w+)`", ONE_BY_ONE.partition("Of torch.distributed only:")[0])
    told.remove("torchestra")
    assert set(told) == names_of_torch() & set(torchestra.__all__)
    assert len(told) == len(set(told))


def test_the_other_names_are_those_that_torch_alone_has() -> None:
    tables = ONE_BY_ONE.partition("Of torch.distributed only:")[2]
    newer = "Of torch.distributed since 2.15, or in its builds for CUDA:"
    always, only_some = map(names_in, tables.split(newer))
    of_torch_alone = names_of_torch() - set(torchestra.__all__)
    assert always <= of_torch_alone <= always | only_some
    if hasattr(torch.distributed, "gather_single") and torch.distributed.is_nccl_available():
        assert of_torch_alone == always | only_some


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=lambda name: name.partition(":")[0])
def test_modules_have_the_names_that_are_told(theirs: str, ours: str) -> None:
    if not theirs.startswith("torch.testing"):  # that needs expecttest
        resolve(theirs)
    if not ours.startswith("not needed"):
        resolve(ours)


def test_the_table_of_modules_was_read() -> None:
    assert len(ROWS) == BY_MODULE.count("\n| `torch.") > 10
