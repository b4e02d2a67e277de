"""Compiles the kernels for the kinds of processors that a wheel brings object files for.

    python -m tools.prebuild

Each kind is compiled in a process of its own, which takes itself to be on a machine of that architecture:
kernels have constants that differ, numbers of system calls for instance.
"""

from __future__ import annotations

import subprocess
import sys

from torchestra.engine.native.object_files import PREBUILT
from torchestra.engine.native.target import LEVELS

_PROGRAM = """
import platform, sys
from torchestra.engine.native.target import LEVELS

target = LEVELS[sys.argv[1]]
platform.machine = lambda: target.machine
from torchestra.engine.kernel_registry import build
from torchestra.engine.native.object_files import keep_prebuilt

path = keep_prebuilt(sys.argv[1], build(target))
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
"""


def main() -> None:
    """Compile for all, and remove what was compiled of other sources."""
    for old in PREBUILT.glob("*.o"):
        old.unlink()
    for level in LEVELS:
        subprocess.run([sys.executable, "-c", _PROGRAM, level], check=True)


if __name__ == "__main__":
    main()
