"""Play rounds of faults until the time is over: ``python -m tools.chaos --minutes 3``, see --help."""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from tools.chaos import plan
from tools.chaos.faults import FAULTS, Fault
from tools.chaos.invariants import Verdict, judge, machine_state
from tools.chaos.report import Report
from tools.chaos.rounds import Round, World
from tools.chaos.workloads import WORKLOADS, import_all
from tools.chaos.worlds import Ranks, ranks_of

from torchestra.engine import warm_up

_PR_SET_CHILD_SUBREAPER = 36
_START_S = 60.0  # until all ranks work
_POLL_S = 0.005
_MAX_LOAD = 10.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description="Real faults for real ranks, at random, for a while."
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="for how long (%(default)s)")
    parser.add_argument("--rounds", type=int, help="at most so many rounds")
    parser.add_argument(
        "--faults", default="", help="of " + ",".join(FAULTS) + "; default: all that can be made"
    )
    parser.add_argument("--seed", type=int, help="repeats a run, with the same faults")
    parser.add_argument("--only", type=int, help="play this round alone, once for each of --rounds")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of %(default)s")
    parser.add_argument("--one-host", action="store_true", help="no worlds of several hosts")
    parser.add_argument("--keep-going", action="store_true", help="play on after a violation")
    parser.add_argument("--load", type=float, help="by what limits are multiplied; default: measured")
    settings = parser.parse_args(arguments)
    settings.workloads = settings.workloads.split(",")
    settings.chosen = settings.faults.split(",") if settings.faults else list(FAULTS)
    if unknown := set(settings.chosen) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    if unknown := set(settings.workloads) - set(WORKLOADS):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}")
    return settings


def load() -> float:
    """Return by what limits are multiplied: more where others keep the cores busy, just now or lately."""
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1  # without this process
    cores = len(os.sched_getaffinity(0))
    return min(_MAX_LOAD, max(1.0, os.getloadavg()[0] / cores, running / cores))


class Player:
    """Plays rounds.

    Args:
        console: where it says what is wrong.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._trainings: dict[World, list[str]] = {}

    def play(self, round_: Round, limit: float) -> Verdict:
        """Play one round, and say what is wrong, with the stacks of all ranks."""
        reference = self._training(round_.world, limit) if round_.workload == "training" else []
        before = machine_state()
        fault = FAULTS[round_.fault](round_)
        times: dict[str, float] = {}
        stacks = ""
        with ranks_of(round_, fault) as ranks:
            hangs = self._run(round_, fault, ranks, times, limit)
            if hangs:
                stacks = ranks.stacks()
                ranks.kill()
            verdict = judge(round_, ranks, times, reference, limit)
            verdict.met = (
                "began" in times or type(fault).begin is Fault.begin
            )  # or it is there from the start
            if hangs:
                verdict.wrong.insert(0, hangs)
            stacks = stacks or ranks.stacks() if verdict.wrong else ""
        for kind, had in before.items():
            if more := machine_state()[kind] - had:
                verdict.wrong.append(f"{kind} are left: {sorted(more)}")
        if verdict.wrong:
            lines = [str(round_), *verdict.wrong, stacks]
            self._console.print("\n".join(lines), markup=False)
        return verdict

    def _run(self, round_: Round, fault: Fault, ranks: Ranks, times: dict[str, float], limit: float) -> str:
        """Have the fault come over the ranks, until they have ended; what hangs, if anything does."""
        try:
            ranks.start()
            if not _await(ranks.all_work, _START_S * limit):
                return "the ranks do not begin to work"
            fault.pids = ranks.pids
            if not ranks.ended() and not _await(ranks.ended, round_.after_s):
                times["began"] = time.time()
                fault.begin()
                until = time.monotonic() + round_.length_s
                while time.monotonic() < until and not ranks.ended():
                    fault.tick()
                    time.sleep(_POLL_S)
                if fault.ends:
                    fault.end()
            waits = round_.work_s + 4 * round_.timeout_s + 2 * round_.heartbeat_s + 10.0 * limit
            return (
                ""
                if _await(ranks.ended, waits)
                else f"it hangs: not all ranks have ended after {waits:.0f} s more"
            )
        finally:
            ranks.kill() if sys.exc_info()[0] else None
            fault.close()

    def _training(self, world: World, limit: float) -> list[str]:
        """Return the digests of a training in such a world that nobody disturbs."""
        if world not in self._trainings:
            round_ = plan.undisturbed(world, limit)
            with ranks_of(round_, Fault(round_)) as ranks:
                if hangs := self._run(round_, Fault(round_), ranks, {}, limit):
                    raise RuntimeError(f"an undisturbed training: {hangs}\n{ranks.stacks()}")
                ended = [ranks.line(rank, "right") for rank in range(world.size)]
                if len({tuple(each["digests"]) if each else () for each in ended}) != 1 or not ended[0]:
                    raise RuntimeError(f"an undisturbed training fails: {round_}\n{ranks.stacks()}")
                self._trainings[world] = ended[0]["digests"]
        return self._trainings[world]


def _await(condition: object, seconds: float) -> bool:
    """Wait until something holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _end(*_: object) -> None:
    """End because of a signal, and leave nothing."""
    sys.exit(128 + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play; return the exit code: 1 if an invariant was violated."""
    settings, console = options(arguments), Console(soft_wrap=True, highlight=False)
    chosen = []
    for name in settings.chosen:
        if why := FAULTS[name].why_not():
            console.print(f"left out: the fault {name}: {why}")
        else:
            chosen.append(name)
    absent = plan.missing()
    if settings.one_host:
        absent[plan.SEVERAL] = "--one-host"
    for what, why in absent.items():
        console.print(f"left out: {what}: {why}")
    seed = random.randrange(1 << 30) if settings.seed is None else settings.seed
    repeat = f"--seed {seed} --faults {','.join(chosen)} --workloads {','.join(settings.workloads)}"
    repeat += " --one-host" if settings.one_host else ""
    console.print(f"{repeat} for {settings.minutes:g} minutes")
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    torch.set_num_threads(1)
    warm_up()
    import_all()
    player, report, violated = Player(console), Report(), 0
    end = time.monotonic() + 60.0 * settings.minutes
    while time.monotonic() < end and report.rounds != settings.rounds:
        number, limit = report.rounds if settings.only is None else settings.only, settings.load or load()
        round_ = plan.draw(number, seed, chosen, [*absent], limit, settings.workloads)
        started = time.monotonic()
        verdict = player.play(round_, limit)
        took = time.monotonic() - started
        report.add(round_, verdict, took, limit)
        if verdict.wrong:
            console.print(f"VIOLATED; again: python -m tools.chaos {repeat} --only {number}", style="red")
            violated += 1
            if not settings.keep_going:
                break
            continue
        late = "" if verdict.met else "; all had ended before the fault"
        console.print(f"{round_}: {', '.join(sorted(set(verdict.outcomes)))} in {took:.1f} s{late}")
    report.show(console)
    held = "every rank was right, was killed, or was told in time what had happened"
    console.print(f"{report.rounds} rounds; {f'{violated} violated an invariant' if violated else held}")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
