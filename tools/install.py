"""Install packages with pip, and say meanwhile what is downloaded and how large it is: `make` calls it.

    .venv/bin/python tools/install.py -c constraints.txt -e '.[dev]'

Arguments are those of `pip install`. Of pip's output only files and sizes are shown; all of it where pip
fails. Needs nothing but Python: it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator

_PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")
_QUIET_SECONDS = 10.0
# "  Downloading https://.../torch-2.9.0-cp311-....whl.metadata (29 kB)", or "Using cached" in the same form.
_FILE = re.compile(
    r"^\s*(Downloading|Using cached) (?:\S*/)?([A-Za-z0-9_.]+?)-(\d\S*?)(?:-\S*)? \(([\d.]+ .?B)\)"
)
_UNPACKING = re.compile(r"^Installing collected packages: (.*)")


def main(arguments: list[str]) -> int:
    """Install; pip's exit code."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pip = subprocess.Popen(
        [sys.executable, *_PIP, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    said: list[str] = []
    try:
        for line in lines(pip):
            if line is None:
                tell(f"... {time.monotonic() - began:.0f} s")
                continue
            said.append(line)
            if (told := worth_telling(line)) is not None:
                tell(told)
    finally:
        if pip.poll() is None:
            pip.terminate()
        code = pip.wait()
    if code:
        print("".join(said), file=sys.stderr, flush=True)
        tell(f"pip has failed (exit code {code}); all that it said is above")
        return code
    tell(f"installed in {time.monotonic() - began:.0f} s")
    return 0


def lines(pip: subprocess.Popen[str]) -> Iterator[str | None]:
    """Yield what pip says, line by line; None each time that it has said nothing for a while."""
    assert pip.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(pip.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if not selector.select(_QUIET_SECONDS):
                yield None
                continue
            # Not by lines: what Python has read ahead no selector sees.
            read = os.read(pip.stdout.fileno(), 1 << 16)
            if not read:
                break
            *whole, rest = (rest + read).split(b"\n")
            for each in whole:
                yield each.decode(errors="replace") + "\n"
        if rest:
            yield rest.decode(errors="replace") + "\n"


def worth_telling(line: str) -> str | None:
    """Return what the user is to know of a line of pip's, if anything."""
    if (found := _FILE.match(line)) is not None:
        how, name, version, size = found.groups()
        if "metadata" in line or size.endswith(" kB"):
            return None
        return f"{'downloading' if how == 'Downloading' else 'from the cache:'} {name} {version}, {size}"
    if (found := _UNPACKING.match(line)) is not None:
        return f"unpacking {len(found[1].split(', '))} packages"
    return None


def tell(text: str) -> None:
    """Say something on stdout, at once."""
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
