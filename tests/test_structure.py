"""Rules about the source as a whole that no single file's test would notice."""

from __future__ import annotations

import ast
import gc
import graphlib
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchestra
from torchestra.system.quick_import import without_collection

SOURCE = Path(torchestra.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOT = Path(__file__).parent.parent
OTHERS = [
    path for name in ("benchmarks", "tools", "verification") for path in sorted((ROOT / name).rglob("*.py"))
]
MAX_LINES = 500
MAX_LINES_OF_A_FUNCTION = 60  # from its `def` to its last line, with its docstring
SPEAKS_TO_TORCH_DISTRIBUTED = (
    "interop/",
    "elastic/dcp.py",
    "store/torch_agent.py",
    "engine/device/",
    "engine/multihost/gloo_bridge.py",
)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Return all files, parsed once. Later modules' collections of garbage would go through what stayed."""
    return {path: ast.parse(path.read_text()) for path in FILES + OTHERS}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def uses_torch_distributed(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            return True
    return False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.rpc import api", True),
        ("import torch\nx = torch.distributed.ReduceOp", True),
        ("import torch\nimport torchestra as dist", False),
        ("from torch.distributions import Normal", False),
    ],
)
def test_the_search_for_torch_distributed_finds_it(text: str, expected: bool) -> None:
    assert uses_torch_distributed(ast.parse(text)) is expected


def test_torch_distributed_is_used_where_torchestra_meets_it_and_nowhere_else(
    trees: dict[Path, ast.Module],
) -> None:
    users = [name_of(path) for path in FILES if uses_torch_distributed(trees[path])]
    assert [name for name in users if not name.startswith(SPEAKS_TO_TORCH_DISTRIBUTED)] == []


MODULES = {
    ".".join(("torchestra", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in FILES
}


def imports_of(tree: ast.Module) -> set[str]:
    """The modules of the package that one imports, in functions and for annotations too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES) | ({node.module} & MODULES if names - MODULES else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
    return found


def test_no_modules_import_each_other_in_a_circle(trees: dict[Path, ast.Module]) -> None:
    graph = {}
    for path in FILES:
        if path.name != "__init__.py":
            graph["torchestra." + name_of(path)[:-3].replace("/", ".")] = imports_of(trees[path])
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_file_is_too_long_to_read() -> None:
    lengths = {path.as_posix(): len(path.read_text().splitlines()) for path in FILES + OTHERS}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_function_is_too_long_to_read(trees: dict[Path, ast.Module]) -> None:
    lengths = {
        f"{path}:{node.name}": node.end_lineno - node.lineno + 1
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert len(lengths) > 1000
    assert {name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FUNCTION} == {}


def test_every_file_says_what_it_is_for(trees: dict[Path, ast.Module]) -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    own = [path for path in FILES if not name_of(path).startswith("compat/")]  # there they are torch's names
    assert [name_of(path) for path in own if path.stem in vague] == []
    assert [name_of(path) for path in FILES if ast.get_docstring(trees[path]) is None] == []


def offered_parts(package: types.ModuleType) -> Iterator[tuple[str, object]]:
    """The functions and classes that a package offers to its users, and the classes' public parts."""
    for name in getattr(package, "__all__", ()):
        value = getattr(package, name)
        if not getattr(value, "__module__", "").startswith("torchestra"):
            continue
        yield f"{package.__name__}.{name}", value
        if inspect.isclass(value):
            for part in dir(value):
                found = getattr(value, part)
                # What torch's modules and optimizers have, and ours inherit, is torch's to document.
                ours = inspect.isfunction(found) and found.__module__.startswith("torchestra")
                if ours and not part.startswith("_"):
                    yield f"{package.__name__}.{name}.{part}", found


def test_everything_a_package_offers_is_documented() -> None:
    """Ruff asks it of every function and class; this one knows of methods that inherit their docstring."""
    names = ["torchestra"]
    names += [found.name for found in pkgutil.walk_packages([str(SOURCE)], "torchestra.") if found.ispkg]
    offered = [part for name in names for part in offered_parts(importlib.import_module(name))]
    assert len(offered) > 100
    assert [name for name, part in offered if not inspect.getdoc(part)] == []


def test_importing_torchestra_starts_no_thread_and_opens_nothing() -> None:
    """So that a process that has imported it may fork its ranks."""
    program = """
import os, threading, torch

def state():
    files = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdecimal()
             and os.path.lexists(f"/proc/self/fd/{fd}")}
    return len(os.listdir("/proc/self/task")), threading.active_count(), files

before = state()
import torchestra
for name in dir(torchestra):
    getattr(torchestra, name)
assert state() == before, (before, state())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("enabled", [True, False])
def test_an_import_leaves_the_garbage_collector_as_it_was(enabled: bool) -> None:
    def load(name: str) -> bool:
        if name == "missing":
            raise AttributeError(name)
        return gc.isenabled()

    get, before = without_collection(load), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert get("name") is False
        with pytest.raises(AttributeError):
            get("missing")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_names_of_subpackages_are_found_by_who_looks_in_the_package() -> None:
    where = r"it is torchestra\.nn\.parallel\.DistributedDataParallel \(import torchestra\.nn\.parallel\)"
    with pytest.raises(AttributeError, match=where) as error:
        torchestra.DistributedDataParallel  # noqa: B018
    assert error.value.name is None  # the interpreter would suggest a name that is like it
    with pytest.raises(AttributeError) as error:
        torchestra.all_redcue  # noqa: B018
    assert error.value.name == "all_redcue"
    assert not hasattr(torchestra, "__no_such_name__")


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their last name."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name in names if names.count(name) > 1) == []
