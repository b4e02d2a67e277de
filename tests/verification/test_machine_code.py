"""Test that the machine code has the orderings that kernels name, on both kinds of processor."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest

from torchestra.engine.native import atomics
from torchestra.engine.native.atomics import (
    compare_exchange,
    fetch_add,
    full_fence,
    load_acquire,
    load_ordered,
    release_fence,
    store_ordered,
    store_release,
)
from torchestra.engine.native.compiler import Program
from torchestra.engine.native.declarations import KernelSource
from torchestra.engine.native.target import LEVELS


def acquires(address):  # type: ignore[no-untyped-def]
    return load_acquire(address)


def loads_in_order(address):  # type: ignore[no-untyped-def]
    return load_ordered(address)


def releases(address):  # type: ignore[no-untyped-def]
    store_release(address, 7)


def stores_in_order(address):  # type: ignore[no-untyped-def]
    store_ordered(address, 7)


def adds(address):  # type: ignore[no-untyped-def]
    return fetch_add(address, 1)


def exchanges(address):  # type: ignore[no-untyped-def]
    return compare_exchange(address, 0, 1)


def fences(address):  # type: ignore[no-untyped-def]
    atomics.store(address, 1)
    full_fence()
    return atomics.load(address + 8)


def fences_stores(address):  # type: ignore[no-untyped-def]
    atomics.store(address, 1)
    release_fence()
    atomics.store(address + 8, 1)


# Per processor: what the assembly of each must have. x86 orders loads and stores by itself, but for a store
# and a later load.
EXPECTED = {
    acquires: (r"mov", r"\bldapr\b|\bldar\b"),
    loads_in_order: (r"mov", r"\bldar\b"),
    releases: (r"mov", r"\bstlr\b"),
    stores_in_order: (r"\bxchg", r"\bstlr\b"),
    adds: (r"\block\b.*\b(xadd|inc|add)", r"\bldaxr\b[\s\S]*\bstlxr\b|\bldaddal\b"),
    exchanges: (r"\block\b.*\bcmpxchg", r"\bldaxr\b[\s\S]*\bstlxr\b|\bcasal\b"),
    fences: (r"\bmfence\b|\block\b", r"\bdmb\s+ish\b"),
    fences_stores: (r"mov[\s\S]*mov", r"\bdmb\s+ish(st)?\b|\bstlr\b"),
}


def assembly_of(function: object, level: str) -> str:
    target = LEVELS[level]
    program = Program(target.machine)
    program.add(KernelSource(function, keeps_interpreter=True))  # type: ignore[arg-type]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2
    )
    module = llvm.parse_assembly(str(program.module))
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    text: str = machine.emit_assembly(module)
    return text


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_orderings_reach_the_machine_code(function: object) -> None:
    x86, arm = EXPECTED[function]  # type: ignore[index]
    assert re.search(x86, assembly_of(function, "x86-64"))
    assert re.search(arm, assembly_of(function, "aarch64"))
