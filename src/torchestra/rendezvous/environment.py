"""The environment variables by which launchers tell ranks their place.

=================  ==========================================  ==========================================
source             rank and number of ranks                    the same within the host
=================  ==========================================  ==========================================
torchrun           RANK, WORLD_SIZE                            LOCAL_RANK, LOCAL_WORLD_SIZE
torchestra         the same, and TORCHESTRA_STORE              the same
environment        the same, set by hand or by another tool    the same
openmpi            OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE
mpich              PMI_RANK, PMI_SIZE (Intel MPI too)          MPI_LOCALRANKID, MPI_LOCALNRANKS
slurm              SLURM_PROCID, SLURM_STEP_NUM_TASKS          SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE
=================  ==========================================  ==========================================

The first source that is found is used. MPI comes before Slurm because mpiexec inside a Slurm job starts its
ranks through Slurm: the SLURM variables the ranks then see are those of MPI's own daemon, one per host.
MASTER_ADDR and MASTER_PORT, where set, are used with every source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchestra.errors import InvalidArgumentError
from torchestra.rendezvous import slurm


@dataclass(frozen=True)
class LaunchEnvironment:
    """A launcher's settings for this process; None where there are none.

    Attributes:
        rank: which rank this is.
        world_size: how many ranks there are.
        local_rank: this rank's number among those on this host.
        local_world_size: how many ranks are on this host.
        master_addr: the host of rank 0.
        master_port: the port on that host at which the ranks are to meet.
        source: ``"torchrun"``, ``"torchestra"``, ``"openmpi"``, ``"mpich"`` (also Intel MPI), ``"slurm"``,
            or ``"environment"`` (plain variables, or none).
    """

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    master_addr: str | None
    master_port: int | None
    source: str


def launch_environment(variables: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the environment.

    Args:
        variables: the variables to read; ``os.environ`` if None. Empty values count as not set.

    Raises:
        InvalidArgumentError: a variable that should be a number is something else.
    """
    variables = _WithoutEmpty(os.environ if variables is None else variables)
    if "RANK" not in variables:
        if "OMPI_COMM_WORLD_RANK" in variables:
            return _from_openmpi(variables)
        if "PMI_RANK" in variables and not _is_slurm_with_pmi(variables):
            return _from_mpich(variables)
        if slurm.launched(variables):
            return _from_slurm(variables)
    return _from_torch(variables)


class _WithoutEmpty(Mapping[str, str]):
    """Variables without those that are empty. No copy of them all, which takes 100 µs: a few are read."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __getitem__(self, name: str) -> str:
        if value := self._variables.get(name):
            return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self._variables.items() if value)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _from_torch(variables: Mapping[str, str]) -> LaunchEnvironment:
    if "TORCHELASTIC_RUN_ID" in variables or variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        source = "torchrun"
    elif "TORCHESTRA_STORE" in variables:
        source = "torchestra"
    else:
        source = "environment"
    return _launch(variables, source, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _from_openmpi(variables: Mapping[str, str]) -> LaunchEnvironment:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _launch(variables, "openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in names))


def _from_mpich(variables: Mapping[str, str]) -> LaunchEnvironment:
    return _launch(variables, "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _from_slurm(variables: Mapping[str, str]) -> LaunchEnvironment:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    world_size = number(variables, size)
    # With MASTER_ADDR alone, the port is still one that all ranks can derive.
    return LaunchEnvironment(
        rank=number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=number(variables, "SLURM_LOCALID"),
        local_world_size=slurm.tasks_on_this_host(variables, world_size),
        master_addr=variables.get("MASTER_ADDR") or slurm.first_host(variables),
        master_port=number(variables, "MASTER_PORT") or slurm.derived_port(variables),
        source="slurm",
    )


def _launch(
    variables: Mapping[str, str],
    source: str,
    rank: str,
    world_size: str,
    local_rank: str,
    local_world_size: str,
) -> LaunchEnvironment:
    return LaunchEnvironment(
        rank=number(variables, rank),
        world_size=number(variables, world_size),
        local_rank=number(variables, local_rank),
        local_world_size=number(variables, local_world_size),
        master_addr=variables.get("MASTER_ADDR"),
        master_port=number(variables, "MASTER_PORT"),
        source=source,
    )


def _is_slurm_with_pmi(variables: Mapping[str, str]) -> bool:
    """Return whether srun itself set the PMI variables; then SLURM's, which tell more, mean these ranks."""
    return (
        slurm.launched(variables)
        and variables["PMI_RANK"] == variables["SLURM_PROCID"]
        and "MPI_LOCALRANKID" not in variables
    )


def number(variables: Mapping[str, str], name: str) -> int | None:
    """Return the integer in a variable, None if it is not set."""
    if name not in variables:
        return None
    try:
        return int(variables[name])
    except ValueError:
        raise InvalidArgumentError(
            f"environment variable {name} must be an integer, got {variables[name]!r}"
        ) from None
