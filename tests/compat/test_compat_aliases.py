"""Modules of the table of aliases are imported like files, in every process."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchestra.options
from torchestra.arguments import options
from torchestra.compat.aliases import ALIASES
from torchestra.system.module_aliases import AliasFinder

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()


@pytest.mark.parametrize("path", ALIASES)
def test_every_module_has_the_names_of_its_row(path: str) -> None:
    module = importlib.import_module(path)
    for source, text in ALIASES[path].items():
        origin = importlib.import_module(source)
        for name in origin.__all__ if "*" in text.split() else ():
            assert getattr(module, name) is getattr(origin, name)
        for entry in set(text.split()) - {"*"}:
            alias, _, name = entry.partition("=")
            assert getattr(module, alias) is getattr(origin, name or alias)


def test_the_documentation_lists_them() -> None:
    rows = re.findall(r"^\| `(torchestra\.compat\.[\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    told = {path: re.findall(r"`([\w.]+)`", text) for path, text in rows if path in ALIASES}
    assert told == {path: list(sources) for path, sources in ALIASES.items() if sources}


PATH = "torchestra.compat.algorithms.ddp_comm_hooks.default_hooks"
FORMS_OF_IMPORT = [
    f"import importlib; assert importlib.import_module({PATH!r}).__name__ == {PATH!r}",
    "import torchestra.compat.nn.api.remote_module as module; module.RemoteModule",
    "from torchestra.compat.algorithms import join; join._JoinConfig",
    "import torchestra.compat as dist; dist.optim.functional_sgd._FunctionalSGD",
    "from torchestra.compat._shard.sharded_tensor import *; ShardedTensor",
    "from torchestra.options import GroupOptions; GroupOptions()",
]
# Each is the first that its process imports of torchestra; torch, which takes long, is there already.
EACH_IN_A_FORK = """
import os, sys, torch

for statement in sys.argv[1:]:
    assert "torchestra" not in sys.modules
    if (pid := os.fork()) == 0:
        exec(statement)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, statement
"""


def test_every_form_of_import_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # by which torch would import torchestra
    command = [sys.executable, "-c", EACH_IN_A_FORK, *FORMS_OF_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_not_in_the_table_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="fully_sharded"):
        importlib.import_module("torchestra.compat.algorithms.fully_sharded")
    with pytest.raises(ImportError, match="JoinUs"):
        from torchestra.compat.algorithms.join import JoinUs  # noqa: F401


def test_a_row_that_names_nothing_is_an_error() -> None:
    finder = AliasFinder({"misnamed": {"torchestra.errors": "NoSuchError"}})
    spec = finder.find_spec("misnamed", None)
    assert spec is not None
    with pytest.raises(AttributeError, match="NoSuchError"):
        finder.exec_module(importlib.util.module_from_spec(spec))


def test_a_module_that_has_moved_keeps_its_old_path() -> None:
    assert torchestra.options.__all__ == sorted(options.__all__)
    assert torchestra.options.GroupOptions is options.GroupOptions
