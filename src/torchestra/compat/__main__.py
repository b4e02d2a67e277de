"""Run a program that says ``torch.distributed`` on torchestra, as it is.

    python -m torchestra.compat script.py [argument ...]
    python -m torchestra.compat -m module [argument ...]

Also under torchestra run, torchrun, Slurm and mpiexec. docs/compat.md tells what is served.
"""

from __future__ import annotations

import sys

from torchestra.compat.running import run


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
    elif not arguments or arguments == ["-m"]:
        raise SystemExit(f"which program?\n{__doc__}")
    elif arguments[0] == "-m":
        run(arguments[1], arguments[2:], is_module=True)
    else:
        run(arguments[0], arguments[1:])


if __name__ == "__main__":
    main()
