"""Run a program that says ``torch.distributed`` and ``"gloo"`` on torchestra, as it is.

    python -m torchestra.interop script.py [argument ...]
    python -m torchestra.interop -m module [argument ...]

The same as TORCHESTRA_FOR=gloo in the environment. Also under torchrun (``torchrun -m torchestra.interop
script.py``) and torchestra run; under mpiexec and srun, whose numbers of ranks are handed on as RANK,
WORLD_SIZE and so on (mpiexec needs MASTER_ADDR and MASTER_PORT besides). See docs/interop.md.
"""

from __future__ import annotations

import os
import sys

from torchestra.launcher.main_script import run_script
from torchestra.launcher.spec import Script
from torchestra.rendezvous import launch_environment
from torchestra.system.switch import SWITCH_VARIABLE


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not arguments or arguments == ["-m"]:
        raise SystemExit(f"which program?\n{__doc__}")
    os.environ[SWITCH_VARIABLE] = "gloo"  # for the processes that the program starts, too
    _hand_on_ranks()
    from torchestra.interop import autoload

    autoload.turn_on_switch()
    is_module = arguments[0] == "-m"
    name, *rest = arguments[1:] if is_module else arguments
    run_script(Script(name, tuple(rest), is_module))


def _hand_on_ranks() -> None:
    """Set torchrun's variables, the only ones torch.distributed knows, from another launcher's."""
    found = launch_environment()
    told = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world_size,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_world_size,
        "MASTER_ADDR": found.master_addr,
        "MASTER_PORT": found.master_port,
    }
    for name, value in told.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


if __name__ == "__main__":
    main()
