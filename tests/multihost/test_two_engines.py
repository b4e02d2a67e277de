"""Every engine offers what the protocol asks for, and all take the same."""

from __future__ import annotations

import inspect

import pytest

from torchestra.compat.registered import RegisteredEngine
from torchestra.engine import local
from torchestra.engine.device.engine import DeviceEngine
from torchestra.engine.fake import FakeEngine
from torchestra.engine.interface import Engine
from torchestra.engine.local import LocalEngine
from torchestra.engine.multihost import engine as multihost
from torchestra.engine.multihost.engine import MultiHostEngine
from torchestra.engine.operations import COLLECTIVES

ENGINES = [LocalEngine, MultiHostEngine, DeviceEngine, FakeEngine, RegisteredEngine]
METHODS = [name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("engine", ENGINES)
def test_their_methods_take_what_the_protocol_says(engine: type[Engine]) -> None:
    for name in METHODS:
        ours, asked = (inspect.signature(getattr(each, name)) for each in (engine, Engine))
        assert list(ours.parameters) == list(asked.parameters), name


def test_every_row_of_the_table_has_its_algorithm() -> None:
    asked = {row.algorithm for row in COLLECTIVES.values()}
    assert asked == set(local.ALGORITHMS) == set(multihost.ALGORITHMS)
