"""What must hold after every round, whatever the fault was."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.chaos.rounds import Round
from tools.chaos.worlds import Ranks, descendants

from torchestra.engine.operations import COLLECTIVES, Kind

_RANKS = re.compile(r"\b(?:ranks? |worker)(\d+(?:(?:, | and )\d+)*)")
_OPERATIONS = re.compile(
    "|".join({*COLLECTIVES, *(kind.name for kind in Kind), "rpc", "call", "init_process_group"})
)
_LIBZMQ_OUT_OF_MEMORY = "FATAL ERROR: OUT OF MEMORY"  # then it ends the process
_OUT_OF_MEMORY = (
    "MemoryError",
    "allocate memory",
    "can't start new thread",
    "Cannot allocate",
    "out of memory",
)
_TELL_S = 3.0
"""How long a death, or a time that is over, may take to be told on an idle machine."""


@dataclass
class Verdict:
    """Describe how a round ended.

    Attributes:
        outcomes: of each rank: ``right``, ``told`` (an error as it must be), ``killed``, ``no memory``.
        longest_s: from the fault's beginning to the last rank's error; 0 if there was none.
        wrong: what does not hold.
        met: whether the fault came while ranks worked; else they had ended before.
    """

    outcomes: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    met: bool = True


def machine_state() -> dict[str, set[str]]:
    """Return what a round may leave behind on the machine, by kind; only what carries our names."""

    def names(folder: str, *prefixes: str) -> set[str]:
        return (
            {name for name in os.listdir(folder) if name.startswith(prefixes)}
            if os.path.isdir(folder)
            else set()
        )

    ours = f"torchestra-chaos-{os.getpid()}-"
    groups = ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/memory")
    return {
        "descriptors": {
            os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)
        },
        "processes": {str(pid) for pid in descendants()},
        "network namespaces": names("/run/netns", f"tq{os.getpid()}x"),
        "control groups": set().union(*(names(group, ours) for group in groups)),
    }


def judge(round_: Round, ranks: Ranks, times: dict[str, float], reference: list[str], load: float) -> Verdict:
    """Look at how every rank has ended.

    Args:
        times: when the fault ``began``, as from ``time.time()``.
        reference: the digests of an undisturbed training.
        load: by which limits are multiplied.
    """
    verdict = Verdict()
    for rank in range(round_.world.size):
        outcome, wrong = _of_rank(round_, ranks, rank, times, load)
        verdict.outcomes.append(outcome)
        verdict.wrong += [f"rank {rank}: {each}" for each in wrong]
        told = ranks.line(rank, "right", "error")
        if told and told["what"] == "error":
            verdict.longest_s = max(verdict.longest_s, told["at"] - times.get("began", told["at"]))
        digests = told["digests"] if told else []
        if round_.workload == "training" and reference and digests != reference[: len(digests)]:
            verdict.wrong.append(f"rank {rank}: its parameters are not those of an undisturbed training")
    kill_tells = round_.fault == "kill" and any(
        each["what"] == "working" for each in ranks.told(round_.victim)
    )
    if (
        kill_tells
        and "killed" in verdict.outcomes
        and round_.workload != "rpc"
        and "right" in verdict.outcomes
    ):
        verdict.wrong.append("a rank was killed in the middle, and another has right results to the end")
    if left := [name for name in os.listdir(ranks.folder / "tmp") if "torchestra" in name]:
        verdict.wrong.append(f"temporary files are left: {left}")
    pids = {
        each["pid"]
        for rank in range(round_.world.size)
        for each in ranks.told(rank)
        if each["what"] == "begun"
    }
    # Whole numbers: the names of others' shared memory have digits, too, and hexadecimal ones.
    shared = [
        name
        for name in os.listdir("/dev/shm")
        if pids & {int(each) for each in re.findall(r"(?<![0-9a-f])[0-9]+(?![0-9a-f])", name)} - {0, 1}
    ]
    if shared:
        verdict.wrong.append(f"shared memory is left: {shared}")
    return verdict


def _of_rank(
    round_: Round, ranks: Ranks, rank: int, times: dict[str, float], load: float
) -> tuple[str, list[str]]:
    """Return one rank's outcome, and what is wrong with it."""
    told, over = ranks.line(rank, "right", "error"), ranks.line(rank, "over")
    threads = round_.world.ranks == "threads"
    wrong = [
        f"it could not leave: {each['text']}" for each in ranks.told(rank) if each["what"] == "leaving failed"
    ]
    if told is None or over is None:
        if round_.world.bridge == "mpi" and _may_fail(round_):
            return "killed", []  # mpiexec ends all ranks when one has died
        pid = ranks.pids[0 if threads else rank] if ranks.pids else 0
        code = ranks.codes.get(pid)
        if (threads or rank == round_.victim) and _kills(round_, code, ranks.said(0 if threads else rank)):
            return "killed", []
        return "ended", [f"its process ended with exit code {code}, and told nothing"]
    wrong += [f"it still has {each}" for each in over["left"]]
    if told["what"] == "right":
        return "right", wrong
    errors = {other: ranks.line(other, "error") for other in range(round_.world.size)}
    left_before = {other for other, each in errors.items() if each and each["at"] < told["at"]}
    outcome, more = _of_error(round_, rank, told, left_before, times, load)
    return outcome, wrong + more


def _kills(round_: Round, code: int | None, said: str) -> bool:
    """Return whether the fault of a round may end its victim with an exit code and these words."""
    if round_.fault == "memory":
        aborted = code == -signal.SIGABRT and _LIBZMQ_OUT_OF_MEMORY in said
        return aborted or (round_.variant == "cgroup" and code == -signal.SIGKILL)
    return round_.fault == "kill" and code == -signal.SIGKILL


def _may_fail(round_: Round) -> bool:
    """Return whether a fault is one that ranks need not survive."""
    stopped_long = round_.fault == "stop" and round_.variant == "long" and round_.world.ranks == "processes"
    cut_long = round_.fault == "link" and round_.variant == "cut for long"
    long_at_all = round_.length_s > round_.heartbeat_s / 2 and round_.fault in ("stop", "link")
    return round_.fault in ("kill", "memory", "shm") or stopped_long or cut_long or long_at_all


def _blamed(round_: Round, rank: int) -> set[int]:
    """Return the ranks that an error on this rank may be about."""
    world, everyone = round_.world, set(range(round_.world.size))
    if round_.fault == "link":
        return {each for each in everyone if world.host_of(each) != world.host_of(rank)}
    if round_.fault == "shm" or world.ranks == "threads":
        return everyone
    return {round_.victim}


def _of_error(
    round_: Round,
    rank: int,
    told: dict[str, Any],
    left_before: set[int],
    times: dict[str, float],
    load: float,
) -> tuple[str, list[str]]:
    """Return whether an error is one that may be, and what is wrong with it."""
    text, wrong = told["text"], []
    head = f"{told['type']}: {text.splitlines()[0][:300] if text else ''}"
    if not _may_fail(round_):
        return "failed", [f"nothing was the matter that it could not survive, but {head}"]
    if round_.fault == "memory" and any(each in f"{told['type']}: {text}" for each in _OUT_OF_MEMORY):
        if rank == round_.victim or round_.world.ranks == "threads":
            return "no memory", []
        if round_.workload == "rpc" and f"(rank {round_.victim})" in text:
            return "told", []  # what a function raises at a worker is raised at its caller
    if not told["ours"]:
        return "failed", [f"the error is not torchestra's: {head}"]
    blamed = _blamed(round_, rank) | left_before  # these have been told, and have gone
    is_victim = rank == round_.victim and round_.fault in ("stop", "memory")
    named = _named(text)
    if not is_victim and not named & blamed and round_.fault != "shm":
        wrong.append(f"the error names ranks {sorted(named)} and none of {sorted(blamed)}: {head}")
    ranks = set(told["ranks"])
    if ranks and re.search("send|recv", told["doing"]):
        ranks |= _named(_diagnosis(text))  # the peer may itself wait for the culprit
    if not is_victim and ranks and not ranks & blamed:
        wrong.append(f"the error's ranks are {told['ranks']} and none of {sorted(blamed)}: {head}")
    if told["doing"] == "init_process_group":  # which group, at least
        missing = not re.search("group|store|ranks", text)
    else:
        missing = not _OPERATIONS.search(text) and "has been silent" not in text  # seen in no operation
    if missing:
        wrong.append(f"the error names no operation: {head}")
    limit = _limit_s(round_) + _TELL_S * load
    if (took := told["at"] - times.get("began", told["at"])) > limit:
        wrong.append(f"the error came {took:.1f} s after the fault, later than {limit:.1f} s: {head}")
    return "told", wrong


def _diagnosis(text: str) -> str:
    """Return the sentence of an error that says who is to blame, and nothing of where all ranks are."""
    return "".join(line for line in text.splitlines() if line.startswith("diagnosis: "))


def _named(text: str) -> set[int]:
    return {int(each) for found in _RANKS.findall(text) for each in re.findall(r"\d+", found)}


def _limit_s(round_: Round) -> float:
    """Return how long after the fault's beginning an operation may wait."""
    if round_.fault == "kill" and not round_.world.bridge:
        return 0.0
    waits = (
        round_.timeout_s + round_.heartbeat_s + (round_.length_s if round_.fault in ("stop", "link") else 0.0)
    )
    return waits + (round_.work_s + 2 * round_.timeout_s if round_.workload == "rpc" else round_.work_s)
