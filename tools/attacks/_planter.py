"""Another user who puts poisoned files where a cache of compiled kernels may be, over and over.

Run by kernel_cache.py, as a script that imports nothing of torchestra, until its stdin is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any


class Planter:
    """Plants below a directory.

    Args:
        order: the directory (``base``), the names of the ``files`` below a cache, and their content, in hex
            digits (``trap``).
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._base = Path(order["base"])
        self._files = order["files"]
        self._trap = bytes.fromhex(order["trap"])
        self._turn = 0
        self.seen: Counter[str] = Counter(files=0, names=0)

    def plant(self, root: Path) -> None:
        """Make a cache full of traps, with the names and modes that the files would have."""
        for name in self._files:
            with contextlib.suppress(OSError):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(self._trap)
                self.seen["files"] += 1

    def turn(self) -> None:
        """Plant wherever it may be, and take the names in directories for all."""
        for name in ("theirs", "for-all", "for-a-group", "writable-files"):
            self.plant(self._base / name)
        self._turn += 1
        replaceable, taken = self._base / "parent-for-all" / "cache", self._base / "sticky" / "cache"
        with contextlib.suppress(OSError):
            if replaceable.stat().st_uid != os.geteuid():
                replaceable.rename(replaceable.with_name(f"away{self._turn}"))
        self.plant(replaceable)
        with contextlib.suppress(OSError):
            if taken.is_symlink():
                taken.unlink()
            elif taken.exists() and taken.stat().st_uid == os.geteuid():
                shutil.rmtree(taken)
        with contextlib.suppress(OSError):
            if self._turn % 3 == 1:
                taken.symlink_to(self._base / "theirs", target_is_directory=True)
            elif self._turn % 3 == 2:
                taken.mkdir()
                self.plant(taken)
            self.seen["names"] += 1


def _main() -> None:
    order = json.loads(sys.argv[1])
    os.setgroups([])
    os.setresgid(order["user"], order["user"], order["user"])
    os.setresuid(order["user"], order["user"], order["user"])
    os.umask(0)
    planter = Planter(order)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        planter.turn()
        if planter.seen["turns"] == 0:
            print("planted", flush=True)
        planter.seen["turns"] += 1
    print(json.dumps(planter.seen))


if __name__ == "__main__":
    _main()
