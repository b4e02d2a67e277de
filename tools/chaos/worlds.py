"""The ranks of a round, as the tool sees them: processes that it starts, and what they have told."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.chaos.faults import Fault
from tools.chaos.network import Network, enter
from tools.chaos.plan import MPIEXEC
from tools.chaos.rank import be_process, be_threads
from tools.chaos.rounds import Round
from tools.mpich_memory import mpich_memory_removed

_POLL_S = 0.005
Told = dict[str, Any]


class Ranks:
    """The ranks of one round.

    Attributes:
        pids: of the processes of the ranks, or of the one whose threads they are; by mpiexec, once known.
        codes: how those that we have started have ended: exit codes, or minus the signal's number.
        folder: what they write is there.
    """

    def __init__(self, round_: Round, fault: Fault, folder: Path, network: Network | None) -> None:
        self._round, self._fault, self.folder, self._network = round_, fault, folder, network
        self.codes: dict[int, int] = {}
        self.pids: list[int] = []
        self._mpiexec: subprocess.Popen[bytes] | None = None
        (folder / "tmp").mkdir()
        (folder / "round").write_text(round_.dump())

    def start(self) -> None:
        """Start them."""
        world = self._round.world
        if world.bridge == "mpi":
            self._start_mpiexec()
            return
        for rank in range(1 if world.ranks == "threads" else world.size):
            pid = os.fork()
            if pid == 0:
                self._be_child(rank)
            self.pids.append(pid)

    def _start_mpiexec(self) -> None:
        program = [sys.executable, "-m", "tools.chaos.rank", str(self.folder), "127.0.0.1"]
        with open(self.folder / "mpiexec", "wb") as out:
            self._mpiexec = subprocess.Popen(
                [str(MPIEXEC), "-n", str(self._round.world.size), *program],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _be_child(self, rank: int) -> None:
        """Live the life of a rank in a forked process, and end."""
        code = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with open(self.folder / f"stderr-{rank}", "wb") as said:
                os.dup2(said.fileno(), 2)
            address = "127.0.0.1"
            if self._network is not None:
                enter(self._network.hosts[self._round.world.host_of(rank)])
                address = "10.77.0.1"
            self._fault.in_rank(rank)
            if self._round.world.ranks == "threads":
                be_threads(self._round, self.folder)
            else:
                be_process(self._round, rank, self.folder, address)
            code = 0
        except BaseException:
            (self.folder / f"failed-{rank}").write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def told(self, rank: int) -> list[Told]:
        """Return what a rank has told so far."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"told-{rank}").read_bytes().split(b"\n")
            return [json.loads(line) for line in lines[:-1]]
        return []

    def said(self, rank: int) -> str:
        """Return what the process that was started for a rank has written to its standard error."""
        with contextlib.suppress(FileNotFoundError):  # mpiexec has started it
            return (self.folder / f"stderr-{rank}").read_text(errors="replace")
        return ""

    def line(self, rank: int, *kinds: str) -> Told | None:
        """Return the last of these lines that a rank has written."""
        return next((each for each in reversed(self.told(rank)) if each["what"] in kinds), None)

    def all_work(self) -> bool:
        """Return whether every rank works, or has ended. Finds the processes that mpiexec has started."""
        ready = all(self.line(rank, "working", "right", "error") for rank in range(self._round.world.size))
        if ready and self._mpiexec is not None and not self.pids:
            begun = [self.line(rank, "begun") for rank in range(self._round.world.size)]
            self.pids = [each["pid"] for each in begun if each]
        return ready or self.ended()

    def ended(self) -> bool:
        """Return whether all have ended; collects those that have."""
        if self._mpiexec is not None:
            if self._mpiexec.poll() is not None:
                self.codes[0] = self._mpiexec.returncode
            return bool(self.codes)
        for pid in set(self.pids) - set(self.codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def stacks(self) -> str:
        """Return where the ranks are: stacks of those that run, and tracebacks of those that failed."""
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)  # for the stacks to be written
        texts = []
        for path in sorted(self.folder.iterdir()):
            if (
                path.name.startswith(("stacks-", "crash-", "failed-", "stderr-", "mpiexec"))
                and path.stat().st_size
            ):
                texts.append(f"--- {path.name}\n{path.read_text(errors='replace')}")
        for rank in range(self._round.world.size):
            for each in self.told(rank):
                shown = {key: value for key, value in each.items() if key not in ("traceback", "digests")}
                texts.append(f"--- rank {rank}: {shown}\n{each.get('traceback', '')}")
        return "\n".join(texts)

    def kill(self) -> list[int]:
        """Kill all that still run; their numbers."""
        left = descendants()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while not self.ended():
            time.sleep(_POLL_S)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return left


def descendants() -> list[int]:
    """Return all processes below this one. Those whose parents have ended come to it (prctl in __main__)."""
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found += children
            todo += children
    return found


@contextmanager
def ranks_of(round_: Round, fault: Fault) -> Iterator[Ranks]:
    """Yield the ranks of a round, not yet started; nothing is left of them afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="torchestra-chaos-"))
    network = Network(len(round_.world.layout)) if round_.world.namespaces else None
    fault.network = network
    ranks = Ranks(round_, fault, folder, network)
    with mpich_memory_removed() if round_.world.bridge == "mpi" else contextlib.nullcontext():
        try:
            yield ranks
        finally:
            ranks.kill()
            if network is not None:
                network.close()
            shutil.rmtree(folder)
