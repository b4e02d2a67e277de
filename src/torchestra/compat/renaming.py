"""The rename of torch.distributed in a program while it is compiled.

It changes import statements and attribute accesses: ``torch.distributed.all_reduce``, or
``nn.parallel.DistributedDataParallel`` after ``from torch import nn``. So nothing is wrapped or replaced in
torch, other modules stay unchanged, and torch.compile sees plain modules. Names that a program looks up by a
string (``importlib``, ``getattr``) are not renamed.
"""

from __future__ import annotations

import ast
import importlib
from typing import Any

__all__ = ["rename"]

# By dotted path: a module of ours, and a name in it (empty: the module itself).
_RENAMED = {
    "torch.distributed": ("torchestra.compat", ""),
    "torch._C._distributed_c10d": ("torchestra.compat.distributed_c10d", ""),
    "torch.autograd.profiler_legacy.profile": ("torchestra.compat.profiler_legacy", "profile"),
    "torch.futures.collect_all": ("torchestra.compat.futures", "collect_all"),
    "torch.futures.wait_all": ("torchestra.compat.futures", "wait_all"),
    "torch.nn.SyncBatchNorm": ("torchestra.nn", "SyncBatchNorm"),
    "torch.nn.parallel.DistributedDataParallel": ("torchestra.nn.parallel", "DistributedDataParallel"),
    "torch.nn.parallel.distributed": ("torchestra.nn.parallel.distributed", ""),
    "torch.utils.data.DistributedSampler": ("torchestra.compat.sampling", "DistributedSampler"),
    "torch.utils.data.distributed": ("torchestra.compat.sampling", ""),
}
# Modules that concern no group, such as launching and supervising processes: torch's own serve.
_GROUPLESS = tuple(
    f"torch.distributed.{name}"
    for name in (
        *("_checkpointable", "_mesh_layout", "_pycute", "_serialization", "algorithms._checkpoint"),
        *("argparse_util", "config", "constants", "elastic", "flight_recorder", "fsdp.wrap", "launch"),
        *("launcher", "logging_handlers", "remote_device", "run"),
    )
)
# Modules whose own code runs on groups of torchestra: see torch_code.py.
_ON_OUR_GROUPS = tuple(
    f"torch.distributed.{name}"
    for name in ("_composable", "_state_dict_utils", "_tools", "checkpoint", "fsdp", "pipelining", "tensor")
)
_KEPT = (*_GROUPLESS, *_ON_OUR_GROUPS)
# Torch's own too in a module that imports one of those, which accept only torch's meshes.
_MESHES = tuple(f"torch.distributed.{name}" for name in ("device_mesh", "init_device_mesh", "DeviceMesh"))
_NEED_WORLD = "from torchestra.compat.torch_code import need_world as _need_world; _need_world()"


def rename(tree: ast.Module) -> ast.Module:
    """Rename in a program, in place; an import without counterpart becomes an ImportError."""
    torchs = any(map(_on_our_groups, _imported(tree)))
    renaming = _Renaming(_bound(tree), (*_KEPT, *_MESHES) if torchs else _KEPT)
    renaming.visit(tree)
    imports: list[ast.stmt] = [
        ast.Import([ast.alias(module, name)]) for module, name in renaming.needed.items()
    ]
    if torchs:
        imports += ast.parse(_NEED_WORLD).body
    first = 0
    while first < len(tree.body) and _must_come_first(tree.body[first]):
        first += 1
    tree.body[first:first] = imports
    return ast.fix_missing_locations(tree)


def _must_come_first(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _within(path: str, parents: tuple[str, ...]) -> bool:
    return f"{path}.".startswith(tuple(f"{parent}." for parent in parents))


def _imported(tree: ast.Module) -> set[str]:
    """Return the dotted paths that a program imports."""
    paths: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths.update(f"{node.module}.{alias.name}" for alias in node.names)
    return paths


def _on_our_groups(path: str) -> bool:
    return _within(path, _ON_OUR_GROUPS) and not _within(path, _GROUPLESS)


def _new_path(path: str, kept: tuple[str, ...] = _KEPT) -> str | None:
    """Return the new form of a dotted path, or None if it stays."""
    if not _within(path, kept):
        for old, (module, name) in _RENAMED.items():
            if _within(path, (old,)):
                return (f"{module}.{name}" if name else module) + path[len(old) :]
    return None


def _bound(tree: ast.Module) -> dict[str, str]:
    """Return the names that the program's imports bind to parts of torch, with their dotted paths."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                bound[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: path for name, path in bound.items() if _within(path, ("torch",))}


def _exists(path: str) -> bool:
    """Return whether a dotted path of ours names a module, or an attribute of one."""
    try:
        importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not _within(path, (error.name,)):
            return True  # it exists, but lacks a dependency: importing it reports that
    else:
        return True
    module, _, name = path.rpartition(".")
    return bool(module) and _exists(module) and hasattr(importlib.import_module(module), name)


def _refusal(message: str) -> ast.stmt:
    text = (
        f"{message}: torchestra has no counterpart of it (docs/compat.md tells what it serves);"
        " TORCHESTRA_FOR=gloo runs a program on torchestra with all of torch.distributed (docs/interop.md)"
    )
    return ast.parse(f"raise ImportError({text!r})").body[0]


class _Renaming(ast.NodeTransformer):
    """Renames in a program's syntax tree.

    Args:
        bound: the dotted paths that its names stand for.
        kept: dotted paths below which torch's own stays.

    Attributes:
        needed: modules that the changed program uses, and its names for them.
    """

    def __init__(self, bound: dict[str, str], kept: tuple[str, ...]) -> None:
        self._bound = bound
        self._kept = kept
        self.needed: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> Any:
        """Rename in ``import torch.distributed.rpc [as rpc]``."""
        statements: list[ast.stmt] = []
        for alias in node.names:
            new = _new_path(alias.name, self._kept)
            if new is None:
                statements.append(ast.Import([alias]))
            elif not _exists(new):
                statements.append(_refusal(f"No module named {alias.name!r}"))
            elif alias.asname:
                statements.append(ast.Import([ast.alias(new, alias.asname)]))
            else:  # binds `torch`; accesses by it are renamed where they are
                statements.append(ast.Import([ast.alias(alias.name.partition(".")[0])]))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Rename in ``from torch.distributed import all_reduce``, ``from torch import distributed, nn``."""
        if node.level or node.module is None:
            return node
        kept: list[ast.alias] = []
        statements: list[ast.stmt] = []
        for alias in node.names:
            all_of_it = alias.name == "*"
            new = _new_path(node.module if all_of_it else f"{node.module}.{alias.name}", self._kept)
            if new is None:
                kept.append(alias)
            elif not _exists(new):
                what = "No module named" if all_of_it else f"cannot import name {alias.name!r} from"
                statements.append(_refusal(f"{what} {node.module!r}"))
            elif all_of_it:
                statements.append(ast.ImportFrom(new, [alias], 0))
            else:
                module, _, name = new.rpartition(".")
                statements.append(ast.ImportFrom(module, [ast.alias(name, alias.asname or alias.name)], 0))
        if kept:
            statements.insert(0, ast.ImportFrom(node.module, kept, 0))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Rename ``torch.distributed``, or an attribute of it."""
        path = self._path(node)
        if path is not None and _within(path, self._kept):
            return self._torchs(node, path)
        if path not in _RENAMED or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        module, name = _RENAMED[path]
        known_as = self.needed.setdefault(module, "_" + module.replace(".", "_"))
        found: ast.expr = ast.Name(known_as, ast.Load())
        if name:
            found = ast.Attribute(found, name, ast.Load())
        return ast.copy_location(found, node)

    def _torchs(self, node: ast.Attribute, path: str) -> ast.expr:
        """Return an expression for torch's own, though the first name may stand for ours now."""
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        renamed = isinstance(root, ast.Name) and self._bound[root.id] == "torch.distributed"
        if not renamed or not isinstance(node.ctx, ast.Load):
            return node
        known_as = self.needed.setdefault("torch.distributed", "_torch_distributed")
        parts = path.split(".")[2:]
        found: ast.expr = ast.Name(known_as, ast.Load())
        for part in parts:
            found = ast.Attribute(found, part, ast.Load())
        return ast.copy_location(found, node)

    def _path(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Attribute) and (path := self._path(node.value)) is not None:
            return f"{path}.{node.attr}"
        return None
