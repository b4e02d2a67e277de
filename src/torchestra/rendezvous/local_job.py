"""A meeting point for the ranks on one host, named after the process that launched them.

mpiexec tells its ranks their numbers but not where to meet. The ranks on one host have one ancestor: the
launcher's process (Hydra's proxy, PRRTE's daemon, Slurm's step daemon), the nearest one above them that
was not itself started as a rank. Its process id and start time, with the job's own number where the
launcher gives one, make the name of an abstract Unix socket. So concurrent jobs get different names, a
wrapper script around the program changes nothing, no free port has to be guessed, and nothing is left
behind however the job ends: the kernel forgets the name with the last process. Only processes of the same
user are admitted.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping

from torchestra.errors import InvalidArgumentError
from torchestra.rendezvous import slurm
from torchestra.store.process import parent_of, start_time

_RANK_VARIABLES = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK", "slurm": "SLURM_PROCID"}
_JOB_VARIABLES = ("PMIX_NAMESPACE", "I_MPI_HYDRA_UUID", "PMI_JOBID")


def local_store_address(variables: Mapping[str, str], source: str) -> str:
    """Return the ``unix:@name`` at which the ranks that the launcher ``source`` started on this host meet.

    Raises:
        InvalidArgumentError: this system has no abstract Unix sockets.
    """
    if not sys.platform.startswith("linux"):
        raise InvalidArgumentError(
            f"ranks started by {source} can meet without an address on Linux only; "
            "set MASTER_ADDR and MASTER_PORT for all of them"
        )
    job = slurm.job_name(variables) if source == "slurm" else None
    if job is None:
        launcher = _launcher(_RANK_VARIABLES[source])
        jobs = (variables.get(name, "") for name in _JOB_VARIABLES)
        job = " ".join((source, *jobs, str(launcher), str(start_time(launcher))))
    digest = hashlib.sha256(job.encode()).hexdigest()[:32]
    return f"unix:@torchestra-{os.getuid()}-{digest}"


def _launcher(variable: str) -> int:
    """Return the nearest ancestor whose environment lacks ``variable``."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
        except OSError:
            break
        if variable.encode() not in names:
            break
        pid = parent_of(pid) or 1
    return pid
