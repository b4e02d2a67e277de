"""Sphinx: the reference of what packages offer, from the one list of names that each has.

``.. offered:: torchestra`` with ``:from: collectives objects`` documents the names that
``torchestra/__init__.pyi`` has from these modules; without ``:from:`` it documents a package's whole
``__all__``. So a new name of a module that has a page appears there by itself; ``tests/docs`` asks that
every module has one. A name that ``torchestra`` (or ``:described-as-in:`` another package) offers as well is
described there and only referred to here: ``torchestra.Store`` and ``torchestra.store.Store``.

``.. command:: run`` shows the help of a command of ``torchestra``.

A reference is right if what it names exists. What the reference describes is linked to, by its public name;
what belongs to Python, torch or the inside of torchestra is shown without a link, as the pages are built,
and read, without a network.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import torchestra
from torchestra.cli import COMMANDS

_log = logging.getLogger(__name__)
_NOTHING = object()


def names_by_module(package: ModuleType) -> dict[str, list[str]]:
    """The names that a package, or its stub, imports, by the module (relative to it) that they are from."""
    source = Path(str(package.__file__))
    stub = source.with_suffix(".pyi")
    found: dict[str, list[str]] = {}
    for node in ast.parse((stub if stub.exists() else source).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix(f"{package.__name__}.")
            found.setdefault(module, []).extend(alias.name for alias in node.names)
    return found


def own_members(kind: type) -> Iterator[str]:
    """The public parts of a class that are torchestra's, not inherited from torch or Python."""
    for name in dir(kind):
        if name.startswith("_"):
            continue
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        part = vars(owner).get(name)
        ours = owner.__module__.startswith("torchestra")
        if ours and (inspect.isroutine(part) or isinstance(part, (property, kind))):
            yield name


class Offered(SphinxDirective):
    """``.. offered:: PACKAGE``, with ``:from: MODULES`` where the package has a stub."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012, as Sphinx declares it
        "from": directives.unchanged_required,
        "described-as-in": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0])
        if "from" in self.options:
            by_module = names_by_module(package)
            names = [name for module in self.options["from"].split() for name in by_module[module]]
        else:
            names = sorted(package.__all__, key=str.lower)
        other = importlib.import_module(self.options.get("described-as-in", "torchestra"))
        lines, elsewhere = [], []
        for name in names:
            value = getattr(package, name)
            if inspect.ismodule(value):
                continue
            if package is not other and getattr(other, name, _NOTHING) is value:
                elsewhere.append(f":py:obj:`~{other.__name__}.{name}`")
                lines += [*_data(package, name), "   :no-typesetting:", ""]
            else:
                lines += _description(package, name, value)
        if elsewhere:
            lines = [f"``{package.__name__}`` has " + ", ".join(elsewhere) + " too.", "", *lines]
        place = nodes.Element()
        self.state.nested_parse(StringList(lines, source=package.__name__), self.content_offset, place)
        return place.children


def _data(package: ModuleType, name: str) -> list[str]:
    return [f".. py:data:: {name}", f"   :module: {package.__name__}"]


def _description(package: ModuleType, attribute: str, value: object) -> list[str]:
    """The directive that describes a value."""
    name = f"{package.__name__}.{attribute}"
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}", ""]
    if not inspect.isclass(value):
        # Autodoc looks for its docstring where it is offered; it stands where it is assigned.
        place = next((each for each, names in names_by_module(package).items() if attribute in names), "")
        module = place if place.startswith("torchestra.") else f"{package.__name__}.{place}".rstrip(".")
        docstring = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", attribute), [])
        if not docstring:
            _log.warning("no docstring stands below %s in %s", attribute, module)
        return [*_data(package, attribute), "", *(f"   {line}" for line in docstring), ""]
    members = ", ".join(own_members(value))
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    return [f".. {kind}:: {name}", *([f"   :members: {members}"] if members else []), ""]


class Command(SphinxDirective):
    """``.. command:: NAME``: what ``torchestra NAME --help`` prints."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        os.environ.update(NO_COLOR="1", COLUMNS="100")
        parser = argparse.ArgumentParser(f"torchestra {name}", description=COMMANDS[name].summary)
        importlib.import_module(COMMANDS[name].module).add_arguments(parser)
        text = parser.format_help()
        return [nodes.literal_block(text, text, language="text")]


def found_by_name(name: str) -> Any:
    """What has this dotted name in Python, or _NOTHING."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            value = getattr(value, part, _NOTHING)
        return value
    return getattr(builtins, name, _NOTHING)


def _public_names(env: BuildEnvironment) -> dict[int, str]:
    """The names that the reference describes classes and functions by, by the identity of these."""
    known: dict[int, str] | None = getattr(env, "_offered_names", None)
    if known is None:
        known = {}
        for name in sorted(env.domains.python_domain.objects, key=len, reverse=True):
            value = found_by_name(name)
            if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
                known[id(value)] = name
        env._offered_names = known  # type: ignore[attr-defined]
    return known


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.TextElement
) -> nodes.Node | None:
    """Find what a reference names that no page describes by that name; None if it does not exist."""
    if node.get("refdomain") != "py":
        return None
    target, context = node["reftarget"], (node.get("py:module") or "torchestra", node.get("py:class"))
    places = [context[0], ".".join(filter(None, context)), "torchestra"]
    for name in (target, *(f"{place}.{target}" for place in places)):
        value = found_by_name(name)
        if value is _NOTHING:
            continue
        public = _public_names(env).get(id(value))
        if public is None:
            return shown
        domain = env.domains.python_domain
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, shown)
    # An annotation's name, as in the module where it stands.
    described = {name for name in env.domains.python_domain.objects if name.endswith(f".{target}")}
    if len(described) == 1:
        public = described.pop()
        return env.domains.python_domain.resolve_xref(
            env, node["refdoc"], app.builder, "obj", public, node, shown
        )
    return None


def miss(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of what torchestra offers and no page describes."""
    for name in torchestra.__all__:
        full = f"torchestra.{name}"
        if full not in env.domains.python_domain.objects and full not in env.domains.python_domain.modules:
            _log.warning("no page of docs/api describes %s", full)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("offered", Offered)
    app.add_directive("command", Command)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", miss)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
