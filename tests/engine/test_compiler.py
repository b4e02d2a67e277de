"""The compiler of kernels: compiled, a function does what it does as Python; and what it refuses."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from torchestra.engine import kernel_registry
from torchestra.engine import layout as at
from torchestra.engine.kernels import iovec, move
from torchestra.engine.native import atomics, intrinsic_code, object_files
from torchestra.engine.native.atomics import External, kernel, load, short_kernel, store
from torchestra.engine.native.compiler import KernelError, Program
from torchestra.engine.native.kernel import NativeIntrinsic, NativeKernel, address_of, declared, entry_point
from worlds import run

LIMIT = 1_000
WORDS = st.integers(-40, 40) | st.integers(-(1 << 62), 1 << 62)
SMALL = st.integers(-12, 12)


@kernel
def arithmetic(a, b, c):  # type: ignore[no-untyped-def]
    result = (a & 0xFF) - (b | c) + ((a ^ b) >> 3) + (c & 7) * 5
    result += -a % 16 + a // 8 + ~b % 3 + b // -5 + c % -7
    divisor = c if c != 0 else 1
    result -= a % divisor
    result ^= (b // divisor) & 0xFFFF
    return result & 0x7FFF_FFFF


@kernel
def choices(a, b, c):  # type: ignore[no-untyped-def]
    found = 0
    if a < b <= c or not b:
        found = 1
    elif b in (1, 2, at.DONE):
        found = 2
    else:
        found = 3
    first, second = min(a, b, c), max(a, b)
    both = a and b
    either = a or b or c
    is_between = first <= c and second >= b
    return (
        found + 10 * (both == either) + 100 * is_between + (first if a > 0 else second) + (7 if both else 0)
    )


@kernel
def loops(a, b, c):  # type: ignore[no-untyped-def]
    total = 0
    for number in range(a, b):
        if number == c:
            continue
        if number > 9:
            break
        for other in range(0, 20, 3):
            total += other * number
            number = 5
        total += number
    for number in range(b, a, -2):
        total = total * 3 + number
    left = a + b
    while True:
        left -= 1
        if left < c:
            return total
        if left % 2:
            continue
        total += left
        if total > LIMIT:
            break
    return -total


@kernel
def _helper(a):  # type: ignore[no-untyped-def]
    if a > 3:
        return


@kernel
def calls(a, b, c):  # type: ignore[no-untyped-def]
    """It has a docstring."""
    _helper(b)
    return arithmetic(a, b, c) + loops(b % 5, c % 7, a) + (_helper(a) == 0)


def _as_python(native: Any, *words: int) -> int:
    return int(native.function(*words))


@pytest.mark.parametrize("native", [arithmetic, choices], ids=lambda native: native.__name__)
def test_compiled_functions_return_what_python_does(native: NativeKernel) -> None:
    compiled = entry_point(native)

    @settings(deadline=None, max_examples=300, database=None)
    @given(WORDS, WORDS, WORDS)
    def compare(a: int, b: int, c: int) -> None:
        assert compiled(a, b, c) == _as_python(native, a, b, c)

    compare()


@pytest.mark.parametrize("native", [loops, calls], ids=lambda native: native.__name__)
def test_compiled_loops_end_where_those_of_python_do(native: NativeKernel) -> None:
    compiled = entry_point(native)

    @settings(deadline=None, max_examples=200, database=None)
    @given(SMALL, SMALL, SMALL)
    def compare(a: int, b: int, c: int) -> None:
        assert compiled(a, b, c) == _as_python(native, a, b, c)

    compare()


def test_a_division_by_0_does_not_end_the_process() -> None:
    @kernel
    def divide(a, b):  # type: ignore[no-untyped-def]
        return a // b + a % b

    assert divide(7, 0) == 7
    assert divide(7, 2) == 4


def test_a_closure_is_compiled_with_what_it_has_closed_over() -> None:
    offset = 30

    @short_kernel
    def add(a):  # type: ignore[no-untyped-def]
        return a + offset + LIMIT

    assert add(-7) == 1023


def test_functions_of_the_c_library_get_what_they_are_declared_with() -> None:
    absolute = External("labs", "i64", "i64")
    narrow = External("abs", "i32", "i32")

    @kernel
    def sizes(a):  # type: ignore[no-untyped-def]
        return absolute(a) + narrow(a)

    assert absolute(-5) == narrow(-5) == 5
    assert sizes(-(1 << 32) - 3) == (1 << 32) + 3 + 3


REFUSED = {
    "a float": "return a + 1.5",
    "a text": "return 'text'",
    "a list": "b = [a]",
    "a loop over something else": "for b in (1, 2): a += b",
    "true division": "return a / 2",
    "an unknown name": "return a + missing",
    "an ordinary function": "return print(a)",
    "too few arguments": "return load()",
    "keywords": "return load(address=a)",
    "a number of 65 bits": "return a + (1 << 64)",
    "with": "with a: pass",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_kernels_cannot_be_written_with_is_refused_with_its_line(what: str, tmp_path: Path) -> None:
    file = tmp_path / "refused.py"
    file.write_text(f"def refused(a):\n    {REFUSED[what]}\n")
    scope: dict[str, Any] = {"__name__": "refused", "load": load}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(KernelError, match=r"refused\.py:2: "):
        kernel(scope["refused"])(0)


def test_a_function_whose_source_is_not_there_is_refused() -> None:
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec("def nowhere(a):\n    return a\n", scope)
    with pytest.raises(KernelError, match="the source of nowhere"):
        kernel(scope["nowhere"])(0)


def test_calls_with_other_than_as_many_ints_are_refused() -> None:
    with pytest.raises(TypeError, match=r"arithmetic\(\) takes 3 ints"):
        arithmetic(1, 2)
    with pytest.raises(TypeError):
        arithmetic(1, 2, "3")
    with pytest.raises(OverflowError):
        arithmetic(1, 2, 1 << 63)
    assert arithmetic(-1, -1, -1) == _as_python(arithmetic, -1, -1, -1)


def test_every_intrinsic_operation_has_machine_code_and_can_be_called() -> None:
    names = {value.__name__ for value in vars(atomics).values() if isinstance(value, NativeIntrinsic)}
    assert names == intrinsic_code.names()
    words = np.zeros(4, dtype=np.int64)
    address = words.ctypes.data
    store(address, -3)
    assert atomics.fetch_add(address, 5) == -3
    assert atomics.compare_exchange(address, 2, 9) == 2
    assert atomics.compare_exchange(address, 2, 11) == 9
    assert load(address) == atomics.load_acquire(address) == atomics.load_ordered(address) == 9


def test_the_engine_has_one_object_with_all_its_kernels() -> None:
    """One that is left out would be compiled anew by every process."""
    names = {each.name for each in kernel_registry.kernels_of_engine()}
    assert {"kernels.move.barrier", "kernels.reduce.all_reduce", "p2p.kernels.transfer"} <= names
    public = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("torchestra.engine.")
        for value in vars(module).values()
        if isinstance(value, NativeKernel) and not value.is_private
    ]
    assert len(public) > 50
    assert [each.name for each in public if each.name not in names] == []
    assert address_of(move.barrier) == move.barrier.address != address_of(iovec.copy_in)


def test_the_digest_of_the_object_sees_all_files_that_constants_come_from() -> None:
    """A kernel is compiled with constants of other modules, and must be compiled anew when these change."""
    engine = Path(object_files.__file__).parents[1]
    seen = {path for pattern in object_files._SOURCES for path in engine.glob(pattern)}
    kernels = [module for module in list(sys.modules.values()) if _has_kernels(module)]
    assert len(kernels) > 10
    for module in kernels:
        assert Path(str(module.__file__)) in seen
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchestra"):
                origin = importlib.import_module(str(node.module))
                for name in (each.name for each in node.names):
                    value = getattr(origin, name, None)
                    if isinstance(value, int) and not isinstance(value, bool):
                        assert Path(str(origin.__file__)) in seen, (module, name)


def _has_kernels(module: ModuleType) -> bool:
    named = getattr(module, "__name__", "").startswith("torchestra.engine.")
    return named and any(
        isinstance(value, NativeKernel) and value.__module__ == module.__name__
        for value in vars(module).values()
    )


def _use() -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for length in (1, 20_000):
        tensor = torch.full((length,), rank + 1.0)
        dist.all_reduce(tensor)
        assert (tensor == 3).all()
        got = torch.empty(length)
        request = dist.isend(tensor + rank, other)
        dist.recv(got, other)
        request.wait()
        assert (got == 3 + other).all()


def test_the_engine_runs_with_its_kernels_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with TORCHESTRA_KERNELS=python: what kernels are compiled of is Python that runs."""
    for each in declared():
        if isinstance(each, NativeKernel):
            monkeypatch.setattr(each, "_entry", each.function)
    run("threads", 2, _use)


def test_what_private_kernels_call_is_compiled_once() -> None:
    program = Program("x86_64")
    program.add(calls)
    program.add(arithmetic)
    text = str(program.module)
    assert text.count("_helper") >= 3
    assert text.count("define internal i64") == 2  # _helper and loops
