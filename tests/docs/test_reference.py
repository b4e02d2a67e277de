"""The reference has a place for everything that torchestra offers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import torchestra
from torchestra.cli import COMMANDS

PAGES = "\n".join(path.read_text() for path in sorted(Path(__file__).parents[2].glob("docs/api/*.rst")))


def modules_offered_by(package: ModuleType) -> Iterator[str]:
    """A package and the modules that its ``__all__`` names, theirs too."""
    yield package.__name__
    for name in getattr(package, "__all__", ()):
        if inspect.ismodule(value := getattr(package, name)):
            yield from modules_offered_by(value)


def offered_modules() -> list[str]:
    """The public modules, but for ``torchestra`` itself, and ``compat``, whose names are torch's own."""
    hooks = importlib.import_module("torchestra.nn.parallel.comm_hooks")
    roots = ["torchestra", "torchestra.testing", "torchestra.algorithms.model_averaging", hooks.__name__]
    roots += [
        f"{hooks.__name__}.{found.name}"
        for found in pkgutil.iter_modules(hooks.__path__)
        if "_hook" in found.name
    ]
    return sorted({name for root in roots for name in modules_offered_by(importlib.import_module(root))})[1:]


def test_what_the_package_offers_has_a_place_by_the_modules_of_its_stub() -> None:
    stub = Path(torchestra.__file__).with_suffix(".pyi").read_text()
    modules = set(re.findall(r"^from \.(\S+) import", stub, re.MULTILINE))
    lines = re.findall(r"^\.\. offered:: torchestra\n   :from: (.*)$", PAGES, re.MULTILINE)
    told = [module for line in lines for module in line.split()]
    assert sorted(modules - set(told)) == [], "give them a place in docs/api"
    assert sorted(told) == sorted(modules)


def test_the_walk_over_modules_finds_them() -> None:
    assert {"torchestra.rpc.leaks", "torchestra.testing.faults", "torchestra.nn.parallel"} < set(
        offered_modules()
    )


@pytest.mark.parametrize("name", offered_modules())
def test_what_a_module_offers_has_a_place(name: str) -> None:
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        assert re.search(rf"^\.\. offered:: {re.escape(name)}$", PAGES, re.MULTILINE), (
            "give it a place in docs/api"
        )
    else:
        parts = [part for part in vars(module).values() if inspect.isroutine(part) or inspect.isclass(part)]
        parts = [part for part in parts if part.__module__ == name]
        names = [part.__name__ for part in parts if not part.__name__.startswith("_")]
        told = re.findall(rf"^\.\. auto\w+:: {re.escape(name)}\.(\w+)$", PAGES, re.MULTILINE)
        assert set(names) <= set(told), "give them a place in docs/api"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_place(name: str) -> None:
    assert re.search(rf"^\.\. command:: {name}$", PAGES, re.MULTILINE)
