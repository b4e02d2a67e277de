"""The stack that a late rank writes is read only when all of it is there."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

from torchestra.testing import stacks
from torchestra.testing.stacks import dump_on_signal, read_dump


def write_own_stack(path: Path) -> str:
    """Write this thread's stack as a late rank does; return the text."""
    dump_on_signal(str(path))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        stacks._dump_file.close()
    return path.read_text()


def test_a_dump_is_whole_from_its_outermost_frame_on(tmp_path: Path) -> None:
    path = tmp_path / "stack"
    lines = write_own_stack(path).splitlines(keepends=True)
    frames, whole = read_dump(str(path))
    assert whole
    names = [frame.name for frame in frames]
    assert {"write_own_stack", "test_a_dump_is_whole_from_its_outermost_frame_on"} < set(names)
    first = next(number for number, line in enumerate(lines) if "write_own_stack" in line)
    for end in range(1, first + 2):
        path.write_text("".join(lines[:end]))
        assert not read_dump(str(path))[1]


def test_without_a_dump_there_are_no_frames(tmp_path: Path) -> None:
    assert read_dump(str(tmp_path / "stack")) == ([], False)
