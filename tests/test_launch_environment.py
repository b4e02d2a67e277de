"""Test what the launchers say to their ranks, and how it is understood."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from torchestra.errors import InvalidArgumentError
from torchestra.rendezvous import LaunchEnvironment, launch_environment, slurm

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[01-08]",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "run",
}
PLAIN = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
MASTER = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SLURM_PORT = 10_000 + (1234 * 131 + 2) % 20_000


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, LaunchEnvironment(None, None, None, None, None, None, "environment")),
        (PLAIN, LaunchEnvironment(3, 4, 1, 2, "host", 29500, "environment")),
        ({"RANK": "", "WORLD_SIZE": "2"}, LaunchEnvironment(None, 2, None, None, None, None, "environment")),
        (TORCHRUN, LaunchEnvironment(3, 4, 1, 2, "host", 29500, "torchrun")),
        ({**PLAIN, "TORCHESTRA_STORE": "h:1"}, LaunchEnvironment(3, 4, 1, 2, "host", 29500, "torchestra")),
        (OPENMPI, LaunchEnvironment(3, 4, 1, 2, None, None, "openmpi")),
        ({**OPENMPI, **MASTER}, LaunchEnvironment(3, 4, 1, 2, "host", 29500, "openmpi")),
        (MPICH, LaunchEnvironment(3, 4, 1, 2, None, None, "mpich")),
        (SRUN, LaunchEnvironment(3, 4, 1, 2, "node07", SLURM_PORT, "slurm")),
        ({**SRUN, **MASTER}, LaunchEnvironment(3, 4, 1, 2, "host", 29500, "slurm")),
        ({**SRUN, **PLAIN, "RANK": "0"}, LaunchEnvironment(0, 4, 1, 2, "host", 29500, "environment")),
        # mpiexec within a Slurm job: Slurm's variables are those of MPI's daemon on this host.
        ({**SRUN, "SLURM_PROCID": "1", **OPENMPI}, LaunchEnvironment(3, 4, 1, 2, None, None, "openmpi")),
        ({**SRUN, "SLURM_PROCID": "1", **MPICH}, LaunchEnvironment(3, 4, 1, 2, None, None, "mpich")),
        # srun --mpi=pmi2 sets some of MPI's variables itself.
        (
            {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"},
            LaunchEnvironment(3, 4, 1, 2, "node07", SLURM_PORT, "slurm"),
        ),
    ],
)
def test_launchers_are_understood(variables: Mapping[str, str], expected: LaunchEnvironment) -> None:
    assert launch_environment(variables) == expected


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_batch_script_is_no_task_of_srun(step: Mapping[str, str]) -> None:
    """It sees SLURM_PROCID=0 and the job's number of tasks, and would wait for tasks that nobody starts."""
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", **step}
    assert launch_environment(job).rank is None


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match="environment variable RANK must be an integer, got 'first'"
    ):
        launch_environment({"RANK": "first"})


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,2]x,m", ["n08x", "n09x", "n10x", "n2x", "m"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("gpu-[001-002],cpu[7]", ["gpu-001", "gpu-002", "cpu7"]),
    ],
)
def test_slurms_host_lists(nodelist: str, hosts: list[str]) -> None:
    assert list(slurm.hosts(nodelist)) == hosts


@pytest.mark.parametrize("nodelist", ["n[1-2", "n[a-b]", "n[[1]", "n[]"])
def test_a_host_list_that_is_none(nodelist: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Slurm's host list"):
        list(slurm.hosts(nodelist))


@pytest.mark.parametrize(
    ("listed", "node", "count"),
    [("4", "0", 4), ("2(x2)", "1", 2), ("3,1", "1", 1), ("1,3", "1", 3), ("2", "0", None), ("x", "0", None)],
)
def test_tasks_per_host(listed: str, node: str, count: int | None) -> None:
    given = {"SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": node}
    assert slurm.tasks_on_this_host(given, 4) == count


def test_derived_ports_differ_by_job_and_step_and_leave_the_ephemeral_range() -> None:
    found = {
        slurm.derived_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(70_000, 70_050)
        for step in range(3)
    }
    assert len(found) == 150
    assert all(port is not None and 1024 <= port < 32768 for port in found)
