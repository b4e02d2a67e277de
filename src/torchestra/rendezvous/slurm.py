"""The variables that srun sets, and Slurm's compressed lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from torchestra.errors import InvalidArgumentError

# Steps from here up are not srun's: the batch script itself, an interactive shell, and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFF00
_LOWEST_PORT, _PORTS = 10_000, 20_000


def launched(variables: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of its tasks.

    A batch script, and what it runs without srun, also sees SLURM_PROCID (0) and SLURM_NTASKS (of the whole
    allocation), but no step.
    """
    if "SLURM_PROCID" not in variables:
        return False
    step = _step(variables)
    if step is not None:
        return step < _FIRST_SPECIAL_STEP
    return "SLURM_STEP_NUM_TASKS" in variables or "SLURM_STEP_NODELIST" in variables


def first_host(variables: Mapping[str, str]) -> str | None:
    """Return the host that task 0 is on, None if no list of hosts is given."""
    lists = (f"SLURM_{what}NODELIST" for what in ("STEP_", "JOB_", ""))
    listed = next(filter(None, map(variables.get, lists)), None)
    return next(hosts(listed), None) if listed else None


def hosts(nodelist: str) -> Iterator[str]:
    """Yield the hosts in a compressed list: ``a[01-02,7],b`` is a01, a02, a7, b.

    Raises:
        InvalidArgumentError: a bracket is not closed, or a range contains something other than numbers.
    """
    if re.search(r"\[[^\]]*(\[|$)", nodelist):
        raise InvalidArgumentError(f"Slurm's host list {nodelist!r} has a bracket that is not closed")
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", entry)
        # Every second part was in brackets.
        choices = [list(_numbers(part)) if index % 2 else [part] for index, part in enumerate(parts)]
        for parts_of_name in itertools.product(*choices):
            yield "".join(parts_of_name)


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit():
            raise InvalidArgumentError(
                f"Slurm's host list has {part!r} in brackets, which is not a range of numbers"
            )
        for value in range(int(low), int(high or low) + 1):
            yield str(value).zfill(len(low))


def tasks_on_this_host(variables: Mapping[str, str], tasks: int | None) -> int | None:
    """Return how many of the step's tasks are on this host; None if Slurm does not say.

    Slurm lists the counts by host, in the form ``2(x3),1``; a step on one host has one count.
    """
    counts: list[int] = []
    listed = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or ""
    for entry in listed.split(",") if listed else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = variables.get("SLURM_NODEID", "0")
    if counts and sum(counts) == tasks and node.isdigit() and int(node) < len(counts):
        return counts[int(node)]
    return None


def job_name(variables: Mapping[str, str]) -> str | None:
    """Return a name for this step that no other step of the cluster has, None if there is no job number."""
    job = variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID")
    return f"slurm {job} {_step(variables) or 0}" if job else None


def derived_port(variables: Mapping[str, str]) -> int | None:
    """Return a port that is the same for all tasks of the step, and usually different for other steps.

    It is below the range that systems use for outgoing connections.
    """
    job = variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID")
    if job is None or not job.isdigit():
        return None
    return _LOWEST_PORT + (int(job) * 131 + (_step(variables) or 0)) % _PORTS


def _step(variables: Mapping[str, str]) -> int | None:
    step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or ""
    return int(step) if step.isdigit() else None
