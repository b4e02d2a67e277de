"""Find the test modules of the installed torch, and write renamed copies into a directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from tools.conformance.renaming import PACKAGE, renamed


class Source(NamedTuple):
    """A module of tests.

    Attributes:
        name: in torch.testing._internal.distributed.
        kind: which of :mod:`tools.conformance.cases` makes test cases of it.
        world_sizes: of those that it is run with; empty: the tests say themselves.
    """

    name: str
    kind: str
    world_sizes: tuple[int, ...] = ()


SOURCES = [
    Source("distributed_test", "spawned", (2, 4)),
    Source("rpc.rpc_test", "remote"),
    Source("rpc.faulty_agent_rpc_test", "faulty"),
    Source("rpc.dist_autograd_test", "remote"),
    Source("rpc.dist_optimizer_test", "remote"),
    Source("rpc.examples.parameter_server_test", "remote"),
    Source("rpc.examples.reinforcement_learning_rpc_test", "remote"),
    Source("rpc.jit.rpc_test", "remote"),
    Source("rpc.jit.dist_autograd_test", "remote"),
    Source("nn.api.remote_module_test", "remote"),
    Source("ddp_under_dist_autograd_test", "remote"),
]

_CASES = """
from tools.conformance.cases import {kind}
globals().update({kind}("{package}.distributed.{name}", __name__))
"""


def write_renamed(directory: Path) -> None:
    """Write the package of renamed modules into a directory, and beside it a module of cases for each source.

    Raises:
        RuntimeError: this torch has no tests.
    """
    found = importlib.util.find_spec("torch.testing._internal.distributed")
    if found is None or found.origin is None:
        raise RuntimeError("the installed torch has no torch.testing._internal.distributed")
    originals = Path(found.origin).parent
    own = {"multi_threaded_pg.py", "fake_pg.py"}  # torchestra.compat.testing is in their place
    files = [path for path in originals.rglob("*.py") if path.name not in own]
    for path in [originals.parent / "dist_utils.py", *files]:
        copy = directory / PACKAGE / path.relative_to(originals.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(renamed(path.read_text()))
    for source in SOURCES:
        cases = directory / f"{cases_of(source)}.py"
        cases.write_text(_CASES.format(kind=source.kind, package=PACKAGE, name=source.name))


def cases_of(source: Source) -> str:
    """The name of the module of a source's test cases."""
    return f"cases_{source.name.replace('.', '_')}"
