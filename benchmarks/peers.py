"""The libraries to measure: the kinds of peers, and how the MPIs of a machine are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torchestra
from benchmarks.options import BenchOptions, MpiEnvironment

__all__ = [
    "Column",
    "Peer",
    "find_peers",
    "library_name",
    "mpi_peer",
    "peer_key",
    "rank_environment",
    "torchestra_environment",
]

_VERSION_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
_PROBE_SECONDS = 30
_HUGE_PAGES = ("NUMPY_MADVISE_HUGEPAGE", "THP_MEM_ALLOC_ENABLE")
_ENVIRONMENTS = (".venv-mpich", ".venv-openmpi", ".venv-impi")
_LIBRARIES = (("mpich", "MPICH"), ("open mpi", "Open MPI"), ("intel", "Intel MPI"), ("mvapich", "MVAPICH"))
# Left over from a launcher that started the benchmark itself; a rank would believe them.
_FOREIGN = re.compile(
    r"(PMI|PMIX|OMPI|HYDRA|HYDI|PRTE|SLURM|TORCHELASTIC|GROUP|ROLE|LOCAL|MASTER)_"
    r"|(RANK|WORLD_SIZE|TORCHESTRA_STORE)$"
)


@dataclass(frozen=True)
class Column:
    """A peer on one kind of memory (``private``, ``symmetric``), or with its ``persistent`` operations.

    The table shows it in a column of its own, but for the persistent operations of an MPI.
    """

    key: str
    title: str
    memory: str = "private"


@dataclass(frozen=True)
class Peer:
    """One set of ranks that is started together.

    Attributes:
        key: its short name; an MPI's is its title in lower case without blanks.
        kind: ``gloo``, ``torchestra``, ``mpi`` or ``memory``, as ``ranks/session.py`` knows them.
        python: the interpreter of its ranks.
        columns: what is measured with these ranks.
        mpiexec: what starts the ranks; None where the benchmark itself does.
        environment: variables that its launcher needs.
    """

    key: str
    kind: str
    python: Path
    columns: tuple[Column, ...]
    mpiexec: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def find_peers(options: BenchOptions, directory: Path) -> tuple[list[Peer], list[str]]:
    """Return the peers that the options ask for, and a line about each that is there but cannot be used."""
    here = Path(sys.executable)
    peers, notes = [], []
    ours = (
        Column("torchestra", "torchestra"),
        Column("symmetric", "symmetric", "symmetric"),
        Column("persistent", "persistent", "persistent"),
    )
    wanted = tuple(column for column in ours if options.wants(column.key))
    if wanted:
        peers.append(Peer("torchestra", "torchestra", here, wanted))
    if options.wants("gloo"):
        peers.append(Peer("gloo", "gloo", here, (Column("gloo", "Gloo"),)))
    given = [(environment, True) for environment in options.mpi]
    found = [MpiEnvironment("", directory / name / "bin" / "python") for name in _ENVIRONMENTS]
    found.append(MpiEnvironment("", here))
    given += [(environment, False) for environment in found if environment.python.exists()]
    keys: set[str] = set()
    for environment, explicit in given:
        peer = mpi_peer(environment)
        if isinstance(peer, str):
            if explicit:
                notes.append(peer)
        elif peer.key in keys:
            if explicit:
                notes.append(f"{environment.name}: another MPI has the same name")
        elif options.wants(peer.key):
            keys.add(peer.key)
            columns = peer.columns if options.wants("persistent") else peer.columns[:1]
            peers.append(replace(peer, columns=columns))
    unknown = sorted(set(options.peers or ()) - {column.key for peer in peers for column in peer.columns})
    notes += [f"{key}: not found on this machine" for key in unknown]
    return peers, notes


def mpi_peer(environment: MpiEnvironment) -> Peer | str:
    """Return the peer that an interpreter with mpi4py makes, or a line that says why it makes none.

    An environment without a name gets that of its library. ``mpiexec`` is the one beside the interpreter,
    else the first on the path.
    """
    label = environment.name or str(environment.python)
    if not environment.python.exists():
        return f"{label}: there is no {environment.python}"
    try:
        probe = subprocess.run(
            [environment.python, "-c", _VERSION_PROBE],
            check=False,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            env=rank_environment({}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{label}: {error}"
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        return f"{label}: mpi4py cannot be used with {environment.python}: {reason}"
    beside = environment.python.absolute().parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        return f"{label}: no mpiexec beside {environment.python}, and none on the path"
    library = library_name(probe.stdout)
    title = environment.name or library
    key = peer_key(title)
    extra = _open_mpi_environment() if library == "Open MPI" else {}
    return Peer(
        key,
        "mpi",
        environment.python.absolute(),
        (Column(key, title), Column(f"{key}-persistent", f"{title} persistent", "persistent")),
        mpiexec=Path(found),
        environment=extra,
    )


def peer_key(title: str) -> str:
    """Return the short name for the command line: lower case, letters and digits."""
    return "".join(character for character in title.lower() if character.isalnum())


def library_name(version: str) -> str:
    """Return the name of an MPI, from the text of ``MPI_Get_library_version``."""
    first = version.strip().splitlines()[0].lower() if version.strip() else ""
    for sign, name in _LIBRARIES:
        if sign in first:
            return name
    return "MPI"


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: this process's own, without another launcher's traces.

    All ranks have one thread, and buffers in pages of one size: by default NumPy, from which the MPIs have
    theirs, asks for huge pages from 4 MB on, and torch does not.
    """
    environment = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment.update(dict.fromkeys(threads, "1"))
    environment.update(dict.fromkeys(_HUGE_PAGES, "0"))
    environment.update(extra)
    return environment


def torchestra_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank that imports torchestra: it finds the one that this process found."""
    environment = rank_environment(extra)
    source = str(Path(torchestra.__file__).resolve().parents[1])
    path = environment.get("PYTHONPATH", "")
    if source not in path.split(os.pathsep):
        environment["PYTHONPATH"] = source + (os.pathsep + path if path else "")
    return environment


def _open_mpi_environment() -> dict[str, str]:
    """Return variables that let Open MPI run more ranks than cores, and run as root."""
    extra = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return extra
