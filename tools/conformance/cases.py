"""Test cases of renamed modules: what PyTorch's own test files do with these modules, a few lines each.

A module's tests are in classes that are to be mixed with a fixture (which agent, which options) and a kind
of ranks. Each function here returns the test cases of one module, by name, for a module that offers them.
"""

from __future__ import annotations

import importlib
import unittest
from types import ModuleType
from typing import Any

from tools.conformance.renaming import PACKAGE

from torchestra.compat.testing import MultiProcessTestCase


def spawned(name: str, owner: str) -> dict[str, type]:
    """Of ``distributed_test``, whose tests are for ranks in a default group; and its plain test cases."""
    module = importlib.import_module(name)

    def set_up(case: Any) -> None:
        module.TestDistBackend.setUp(case)
        case._spawn_processes()

    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    cases = {"TestDistBackendWithSpawn": type("TestDistBackendWithSpawn", bases, {"setUp": set_up})}
    for plain in _classes(module, unittest.TestCase):
        if plain is not module.TestDistBackend:
            cases[plain.__name__] = type(plain.__name__, (plain,), {})
    return _owned(cases, owner)


def remote(name: str, owner: str) -> dict[str, type]:
    """Of a module about remote calls: each class of tests with the agent that torch has, in processes."""
    fixture = importlib.import_module(f"{PACKAGE}.distributed.rpc.tensorpipe_rpc_agent_test_fixture")
    return _with_agent(name, owner, fixture.TensorPipeRpcAgentTestFixture, "Faulty", wanted=False)


def faulty(name: str, owner: str) -> dict[str, type]:
    """The same with an agent that loses and delays messages."""
    fixture = importlib.import_module(f"{PACKAGE}.distributed.rpc.faulty_rpc_agent_test_fixture")
    return _with_agent(name, owner, fixture.FaultyRpcAgentTestFixture, "Faulty", wanted=True)


class _InProcesses(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def _with_agent(name: str, owner: str, agent: type, part: str, *, wanted: bool) -> dict[str, type]:
    module = importlib.import_module(name)
    base = importlib.import_module(f"{PACKAGE}.distributed.rpc.rpc_agent_test_fixture").RpcAgentTestFixture
    chosen = [kind for kind in _classes(module, base) if (part in kind.__name__) == wanted]
    outermost = [kind for kind in chosen if not any(kind in other.__mro__[1:] for other in chosen)]
    return _owned(
        {kind.__name__: type(kind.__name__, (kind, agent, _InProcesses), {}) for kind in outermost}, owner
    )


def _classes(module: ModuleType, base: type) -> list[type]:
    own = [each for each in vars(module).values() if isinstance(each, type) and each is not base]
    return [each for each in own if issubclass(each, base) and each.__module__ == module.__name__]


def _owned(cases: dict[str, type], owner: str) -> dict[str, type]:
    for case in cases.values():
        case.__module__ = owner  # where the ranks' processes find it
    return cases
