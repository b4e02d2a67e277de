"""``make bench``: every operation, compared with the peers found on the machine.

::

    python -m benchmarks                                  # 2 and 4 ranks, 4 B to 64 MB, every peer found
    python -m benchmarks --quick
    python -m benchmarks --nproc 2 --ops all_reduce,barrier --sizes 4B,4KB,64MB --peers gloo,torchestra
    python -m benchmarks --mpi "Open MPI=.venv-openmpi/bin/python" --markdown
    python -m benchmarks --ops broadcast --nproc 4 --sections collectives --add    # a piece more

It prints a table per world size and writes ``bench.json``, ``bench.png`` (where matplotlib is installed)
and, with ``--markdown``, ``bench.md`` into ``out/bench``.

**Pieces.** With ``--add`` the results are added to the existing ``bench.json``, replacing cells that both
have; so the whole can be measured piece by piece, when the machine is free. Pieces of another
machine, or measured in another way, are refused.

**Peers.** torch's Gloo, always; torchestra on ordinary tensors, on tensors from ``dist.empty``
(*symmetric*), which live in the group's memory, and with *persistent* operations on ordinary tensors
(``dist.all_reduce_init`` and others); every MPI given by ``--mpi NAME=PYTHON``, or found in
``.venv-mpich``, ``.venv-openmpi``, ``.venv-impi`` of the current directory, or in the current
environment, wherever mpi4py and an ``mpiexec`` are. A peer that does not start, or that breaks down
halfway, is left out from there on, and the report says why. Each MPI's persistent operations (MPI-4) are
measured too; they are in the JSON, and persistent operations are compared with the fastest of all. The
wheel of Open MPI (5.0) has neither ``coll/xhc`` nor ``acoll``, which come with a later version.

**What a size means.** The number of bytes that a rank puts in, of float32: ``ranks/shapes.py`` has the
table of what each operation gives out for that (all_gather: world times the size; reduce_scatter: the
size divided by the world; …). all_reduce, reduce and broadcast work in place.

**What a time means.** A rank's input is written anew before every call, because unchanged buffers stay in the
caches of the ranks that have read them, which flatters every library; that is not timed, and the cost of
reading the clock is subtracted. From 256 KB on the ranks meet in a barrier between the writing
and the call, as they may share cores. (``--unaltered``: buffers stay as they are, and calls follow each other
with nothing between them.) Short operations are timed in batches of about a millisecond; a batch counts as
the mean of its calls, on the rank where that is largest. A cell is the median over the batches of all
rounds. Its p99 is over single calls, each timed on its own (the slowest rank of each).
``send_recv`` is half a round trip, all pairs 0-1, 2-3, … at once. Operations with a root
(broadcast, reduce, gather, scatter) may overlap with the next call, for every peer alike: for those
this is the time per call in a stream of calls.

**Fairness.** Every rank is one process with one thread. All peers' ranks are started before the first
measurement of a world size; ranks that wait for their turn block in a read of a socket. Within a cell the
peers take turns, for several rounds, so that drift of the machine affects all alike. The
report says how busy the machine was with other things (*disturbance*): above a few percent the
microseconds are not to be trusted, least of all those of peers that spin.

**Correctness.** After its timing each cell is run once more on values derived from rank and index, and
every rank compares all of its result. A wrong result is shown as such and makes the exit code 1.

**The floor.** As many processes as there are ranks stream at once through buffers of their own, far
larger than the caches, reading and writing back each element; the best rate seen during the run is the
memory's bandwidth B (bytes read plus bytes written per second, all processes together). The floor of a
cell is ``(R + W) / B`` with R the bytes that have to be read at least once and W those that have to be
written (``roofline.py``); for all_reduce in place of n bytes on N ranks R = W = N n. It is given from
16 MB on; below, buffers may stay in caches, which are faster than the memory.

**Start-up.** The time from the launch of ``python -m torchestra run`` and of ``torchrun`` to the moment
when the last rank has finished its first all_reduce.

**Training.** The bare model, torchestra's DDP and torch's on Gloo take turns, in all orders; what the two
add is the median of paired differences. With ``--loaded`` another process spins on each core meanwhile; its
table is one of its own.

**Interop.** torch.distributed with torchestra as its backend and with Gloo, by turns: all_reduce, and steps
(forward and backward) of PyTorch's own DDP, FSDP2 and tensor parallel, whose losses must agree.

**Remote calls.** Two workers of each library in the same two processes, which take turns; a call's time is
measured by the caller, from the call to its result, or the time of 2,000 calls at once divided by their
number.

To add a section: measure it in a module of its own that returns a
:class:`~benchmarks.report.SideTable`, and add its name to ``SECTIONS`` in ``options.py`` and to
``run_benchmark``; table, Markdown and JSON follow.
"""

from benchmarks.options import BenchOptions, MpiEnvironment
from benchmarks.report import BenchReport
from benchmarks.run import run_benchmark

__all__ = ["BenchOptions", "BenchReport", "MpiEnvironment", "run_benchmark"]
