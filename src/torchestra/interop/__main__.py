"""Run a program that says ``torch.distributed`` and ``"gloo"`` on torchestra, as it is.

    python -m torchestra.interop script.py [argument ...]
    python -m torchestra.interop -m module [argument ...]

The same as TORCHESTRA_FOR=gloo in the environment. Also under torchrun (``torchrun -m torchestra.interop
script.py``), torchestra run, mpiexec and Slurm. docs/interop.md tells what is served.
"""

from __future__ import annotations

import os
import sys

from torchestra.launcher.main_script import run_script
from torchestra.launcher.spec import Script
from torchestra.system.switch import SWITCH_VARIABLE


def main() -> None:
    """Do what the command line asks for."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not arguments or arguments == ["-m"]:
        raise SystemExit(f"which program?\n{__doc__}")
    os.environ[SWITCH_VARIABLE] = "gloo"  # for the processes that the program starts, too
    from torchestra.interop import autoload

    autoload.turn_on_switch()
    is_module = arguments[0] == "-m"
    name, *rest = arguments[1:] if is_module else arguments
    run_script(Script(name, tuple(rest), is_module))


if __name__ == "__main__":
    main()
