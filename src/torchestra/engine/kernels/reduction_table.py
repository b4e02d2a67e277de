"""The table of reductions: each dtype's operations, how its elements are stored and computed with."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "DIVIDE", "SCALE")
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, DIVIDE, SCALE = range(len(NAMES))
SWAP_MODE = "float_mode.swap"
"""The function that writes the thread's floating-point mode."""
_ARITHMETIC = (SUM, AVG, PRODUCT, MIN, MAX)
_BITWISE = (BAND, BOR, BXOR)
_ALL = _ARITHMETIC + _BITWISE


@dataclass(frozen=True)
class Element:
    """Describe how one dtype is stored and computed with.

    Attributes:
        kind: "float", "bfloat16", "float16", "signed", "unsigned" or "bool".
        bits: of each part.
        operations: those that its values can be combined by.
        parts: 2 for complex, which is reduced part by part.
    """

    kind: str
    bits: int
    operations: tuple[int, ...]
    parts: int = 1


ELEMENTS: dict[str, Element] = {
    "float32": Element("float", 32, _ARITHMETIC),
    "float64": Element("float", 64, _ARITHMETIC),
    "bfloat16": Element("bfloat16", 16, _ARITHMETIC),
    "float16": Element("float16", 16, _ARITHMETIC),
    "complex64": Element("float", 32, (SUM, AVG), parts=2),
    "complex128": Element("float", 64, (SUM, AVG), parts=2),
    "bool": Element("bool", 8, (SUM, PRODUCT, MIN, MAX, *_BITWISE)),
    "int8": Element("signed", 8, _ALL),
    "int16": Element("signed", 16, _ALL),
    "int32": Element("signed", 32, _ALL),
    "int64": Element("signed", 64, _ALL),
    "uint8": Element("unsigned", 8, _ALL),
    "uint16": Element("unsigned", 16, _ALL),
    "uint32": Element("unsigned", 32, _ALL),
    "uint64": Element("unsigned", 64, _ALL),
}


def default_mode(machine: str) -> tuple[int, int]:
    """Return the floating-point mode that is computed in, and which of its bits are a mode.

    Of MXCSR all exceptions are masked, and no other bit is set but those that note exceptions, which are no
    mode.
    """
    return (0x1F80, 0xFFC0) if machine in ("x86_64", "AMD64") else (0, 0xFFFF_FFFF)


def functions() -> list[tuple[str, int]]:
    """Return every dtype's name with each of its operations, those of one operand included."""
    found = []
    for name, element in ELEMENTS.items():
        divided = (DIVIDE,) if AVG in element.operations else ()
        scaled = (SCALE,) if element.kind in ("float", "bfloat16", "float16") else ()
        found += [(name, operation) for operation in (*element.operations, *divided, *scaled)]
    return found


def symbol(dtype: str, operation: int) -> str:
    """Return what the compiled function of a dtype and operation is called in the machine code."""
    return f"reduction.{dtype}.{NAMES[operation]}"
