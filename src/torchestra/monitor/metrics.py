"""``torchestra metrics``: what the jobs of this host do, for Prometheus, node_exporter and OpenTelemetry.

Ranks count in the memory that they share, always (engine/recorder/recorder.py), so a job is read from outside
and takes no part in it: nothing has to be switched on, and a hung or aborted job is read like any other.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchestra.engine import layout as at
from torchestra.engine.layout import SIZE_CLASS_BOUNDS
from torchestra.engine.recorder.flight_entries import RankRecord
from torchestra.engine.recorder.flight_record import (
    FlightRecord,
    Readable,
    group_name,
    is_being_left,
    read_flight_record,
)
from torchestra.engine.recorder.trace import replacing
from torchestra.errors import DistError
from torchestra.monitor.jobs import Group, find_jobs
from torchestra.monitor.numbers_between import seconds_between
from torchestra.system.interrupts import Interrupts

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_PORT = 9400
_LOOK_SECONDS = 1.0
_ENTRIES = 1  # of a rank's last operations: whether it is in one
_SIZES = {bound: f"{bound >> 20} MiB" if bound >> 20 else f"{bound >> 10} KiB" for bound in SIZE_CLASS_BOUNDS}
_LARGEST = "more"
_EPILOG = f"""\
All jobs of this user on this host are told of, each by the process id of its first rank. Operations are
counted by kind and by what one rank moves: up to {", ".join(_SIZES.values())}, or {_LARGEST}.
"""


class MetricFamily(NamedTuple):
    """A metric, which has a value for each combination of its labels.

    Attributes:
        name: without Prometheus' prefix and suffix.
        unit: of its values, "" for numbers.
        help: what it is.
        labels: their names.
        grows: it is a counter; if not, a gauge.
    """

    name: str
    unit: str
    help: str
    labels: tuple[str, ...]
    grows: bool = True


_RANK = ("job", "group", "rank")
_OPERATION = (*_RANK, "operation", "size")
OPERATIONS = MetricFamily("operations", "", "Collectives and messages that have ended.", _OPERATION)
BYTES = MetricFamily(
    "operation", "bytes", "What the rank gave or got in them, whichever is more.", _OPERATION
)
SECONDS = MetricFamily("operation", "seconds", "The time that they took.", _OPERATION)
WAITING = MetricFamily(
    "operation_waiting", "seconds", "Of that, what was spent waiting for other ranks.", _OPERATION
)
WAITED_FOR = MetricFamily(
    "waiting_for", "seconds", "Time spent waiting, by the rank waited for.", (*_RANK, "peer")
)
RUNNING = MetricFamily(
    "running", "seconds", "For how long the rank is in a collective; 0: in none.", _RANK, False
)
UP = MetricFamily("rank_up", "", "1 while the process of the rank runs.", _RANK, False)
ABORTED = MetricFamily(
    "group_aborted", "", "1 when the group cannot be used any more.", ("job", "group"), False
)
_CALL = (*_RANK, "caller", "function")
CALLS = MetricFamily("rpc_calls", "", "Calls by RPC that the rank has executed.", _CALL)
CALL_SECONDS = MetricFamily("rpc_call", "seconds", "The time that their execution took.", _CALL)
CALLS_MADE = MetricFamily("rpc_calls_made", "", "Calls by RPC that the rank has made.", _RANK)
CALLS_SENT = MetricFamily("rpc_sent", "bytes", "What it has sent other ranks, in calls and answers.", _RANK)
QUEUED = MetricFamily(
    "queued_operations", "", "Operations that the program has called and that are not begun.", _RANK, False
)
CALLS_IN_FLIGHT = MetricFamily(
    "rpc_calls_in_flight", "", "Calls by RPC whose answer the rank waits for.", _RANK, False
)
REFERENCES = MetricFamily(
    "rpc_references", "", "Remote references that are alive: owned or used here.", (*_RANK, "role"), False
)
_HOST = ("job", "group", "host")
HEARTBEATS = MetricFamily("heartbeats", "", "Control messages that this host has got from another.", _HOST)
HEARTBEAT_AGE = MetricFamily("heartbeat_age", "seconds", "The time since the last of them.", _HOST, False)
_GROUP = ("job", "group")
GENERATION = MetricFamily(
    "group_generation", "", "How often the group has been shrunk or grown.", _GROUP, False
)
SHRINKS = MetricFamily("group_shrinks", "", "How often it has lost ranks.", _GROUP)
GROWS = MetricFamily("group_grows", "", "How often ranks were let into it.", _GROUP)
_STATES = ("starts", "joins", "trains", "dead", "done")
MEMBERS = MetricFamily("members", "", "Ranks of an elastic job, by what they do.", ("job", "state"), False)
RESTARTS = MetricFamily("restarts", "", "Replacements that an elastic job has started.", ("job",))
FAMILIES = (OPERATIONS, BYTES, SECONDS, WAITING, WAITED_FOR, RUNNING, UP, ABORTED, CALLS, CALL_SECONDS,
            CALLS_MADE, CALLS_SENT, QUEUED, CALLS_IN_FLIGHT, REFERENCES, HEARTBEATS, HEARTBEAT_AGE,
            GENERATION, SHRINKS, GROWS, MEMBERS, RESTARTS)  # fmt: skip

Sample = tuple[MetricFamily, tuple[str, ...], float]
"""A value of a metric, and the values of its labels."""


def samples() -> Iterator[Sample]:
    """Return what the jobs of this user on this host have done until now."""
    for job in find_jobs()[0]:
        if (membership := job.membership) is not None:
            yield from _of_membership(str(job.pid), membership)
        for name, group in _named(job.groups):
            yield from _of_group((str(job.pid), name), group)


def _named(groups: Sequence[Group]) -> Iterator[tuple[str, Group]]:
    """Return groups with their names, each name once: readers may refuse all if a sample is there twice.

    A group that is just being destroyed is left out where another has its name already. Of others the newest
    has the name, and those that a program has made before it, of other stores, have a number as well.
    """
    found: Counter[str] = Counter()
    being_left = {id(group): is_being_left(group.arena) for group in groups}
    for group in sorted(groups, key=lambda group: (being_left[id(group)], -group.arena.made)):
        name = group_name(group.arena)
        found[name] += 1
        if found[name] == 1:
            yield name, group
        elif not being_left[id(group)]:
            yield f"{name} ({found[name]})", group


def _of_membership(job: str, membership: Mapping[str, Any]) -> Iterator[Sample]:
    """Return the samples of what an elastic job's launcher tells."""
    states = Counter(member["state"] for member in membership["members"])
    for state in _STATES:
        yield MEMBERS, (job, state), states[state]
    yield RESTARTS, (job,), membership["restarted"]


def _of_group(labels_of_group: tuple[str, str], group: Group) -> Iterator[Sample]:
    record = read_flight_record(group.arena, _ENTRIES)
    # The counts of a group that replaces another begin anew, as a restarted program's do.
    yield ABORTED, labels_of_group, float(record.aborted is not None)
    for family, word in ((GENERATION, at.GENERATION), (SHRINKS, at.TIMES_SHRUNK), (GROWS, at.TIMES_GROWN)):
        yield family, labels_of_group, group.arena.load_word(word)
    yield from _heartbeats(group.arena, labels_of_group)
    for local_rank, rank in enumerate(record.ranks):
        labels = *labels_of_group, str(rank.rank)
        yield UP, labels, float(group.is_alive(local_rank))
        yield from _of_rank(record, rank, labels)


def _heartbeats(arena: Readable, labels: tuple[str, ...]) -> Iterator[Sample]:
    """Return what the first rank of this host has heard from other hosts."""
    now = time.monotonic_ns()
    for host in range(at.HEARTBEAT_HOSTS):
        entry = at.HEARTBEATS_AT + host * at.HEARTBEAT_BYTES
        if (count := arena.load_word(entry + at.HEARTBEAT_COUNT)) > 0:
            age_s = (now - arena.load_word(entry + at.HEARTBEAT_NANOSECONDS)) / 1e9
            yield HEARTBEATS, (*labels, str(host)), count
            yield HEARTBEAT_AGE, (*labels, str(host)), max(0.0, age_s)


def _of_rank(record: FlightRecord, rank: RankRecord, labels: tuple[str, ...]) -> Iterator[Sample]:
    for tally in rank.tallies:
        kind = f"{tally.kind} between hosts" if tally.remote else tally.kind
        size = _LARGEST if tally.most_bytes is None else _SIZES[tally.most_bytes]
        own = *labels, kind, size
        yield OPERATIONS, own, tally.calls
        yield BYTES, own, tally.nbytes
        yield SECONDS, own, tally.seconds
        yield WAITING, own, tally.waited
    for peer, seconds in enumerate(rank.waited_for):
        if peer != rank.rank:
            yield WAITED_FOR, (*labels, str(peer)), max(0.0, seconds)
    for calls in rank.calls:
        called = *labels, "several" if calls.caller < 0 else str(calls.caller), calls.function
        yield CALLS, called, calls.calls
        yield CALL_SECONDS, called, calls.seconds
    yield QUEUED, labels, rank.queued
    if rank.is_rpc_worker:
        yield CALLS_MADE, labels, rank.calls_made
        yield CALLS_SENT, labels, rank.calls_sent_bytes
        yield CALLS_IN_FLIGHT, labels, rank.calls_in_flight
        yield REFERENCES, (*labels, "owned"), rank.references_owned
        yield REFERENCES, (*labels, "used"), rank.references_used
    last = rank.last_operation
    runs = last is not None and last.state == "running"
    yield RUNNING, labels, record.taken - last.started if last is not None and runs else 0.0


class Collector:
    """Give Prometheus' client library the samples: ``prometheus_client.REGISTRY.register(Collector())``."""

    def collect(self) -> Iterable[Metric]:
        """Return the present values, for a registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[MetricFamily, Metric] = {}
        for family in FAMILIES:
            kind = CounterMetricFamily if family.grows else GaugeMetricFamily
            name = "_".join(filter(None, ("torchestra", family.name, family.unit)))
            families[family] = kind(name, family.help, labels=family.labels)
        for family, labels, number in samples():
            families[family].add_metric(labels, number)  # type: ignore[attr-defined]
        return families.values()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry need not look for jobs when this is registered."""
        return ()


def observe(meter: Meter) -> None:
    """Have an OpenTelemetry meter observe the samples, as ``torchestra.operations`` and so on.

    Args:
        meter: from ``opentelemetry.metrics.get_meter(...)``; its provider decides how often it looks.
    """
    snapshot = _Snapshot()
    for family in FAMILIES:
        make = meter.create_observable_counter if family.grows else meter.create_observable_gauge
        name = ".".join(filter(None, ("torchestra", family.name, family.unit)))
        make(name, [_callback(family, snapshot)], unit={"seconds": "s", "bytes": "By"}.get(family.unit, "1"),
             description=family.help)  # fmt: skip


class _Snapshot:
    """The samples of one collection, which asks for each family once: jobs are looked for only once."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._missing: set[MetricFamily] = set()
        self._lock = threading.Lock()

    def of(self, family: MetricFamily) -> list[Sample]:
        """Return the samples of a family; new ones, if it has been asked for since the last were taken."""
        with self._lock:
            if family not in self._missing:
                self._samples, self._missing = list(samples()), set(FAMILIES)
            self._missing.discard(family)
            return [sample for sample in self._samples if sample[0] is family]


def _callback(
    family: MetricFamily, snapshot: _Snapshot
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def values(_: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        for _family, labels, number in snapshot.of(family):
            yield Observation(number, dict(zip(family.labels, labels, strict=True)))

    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--port", type=int, default=_PORT, help=f"to serve Prometheus at (default: {_PORT})")
    way.add_argument("--textfile", type=Path, metavar="FILE.prom", help="write this anew for node_exporter")
    way.add_argument("--once", action="store_true", help="print the present values and exit")
    parser.add_argument(
        "--address", default="127.0.0.1", help="to serve at (default: 127.0.0.1, this host alone)"
    )
    parser.add_argument(
        "--interval",
        type=seconds_between(0.001, 86400),
        default=15.0,
        metavar="S",
        help="between two files (default: 15 seconds)",
    )


def main(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; return 1 if that is not possible."""
    try:
        registry = _registry()
        if options.once:
            sys.stdout.write(_text(registry))
        elif options.textfile is not None:
            _write_for_ever(registry, options.textfile, options.interval)
        else:
            _serve(registry, options.address, options.port)
    except KeyboardInterrupt:
        return 0
    except (DistError, OSError) as error:
        print(f"torchestra metrics: {error}", file=sys.stderr)
        return 1
    return 0


def _registry() -> CollectorRegistry:
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise DistError(
            "Prometheus' client library is not installed: pip install 'torchestra[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(Collector())
    return registry


def _text(registry: CollectorRegistry) -> str:
    from prometheus_client import generate_latest

    text: bytes = generate_latest(registry)
    return text.decode()


def _write_for_ever(registry: CollectorRegistry, path: Path, interval_s: float) -> None:
    """Write the file again and again until Ctrl-C, which lets the last one become whole."""
    with Interrupts(raising=False) as interrupts:
        while not interrupts.came:
            with replacing(path) as file:
                file.write(_text(registry))
            interrupts.wait(interval_s)


def _serve(registry: CollectorRegistry, address: str, port: int) -> None:
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:  # the second: no number of a port
        raise DistError(
            f"cannot serve at {address}, port {port}: {error}; choose others by --address and --port, 0 for"
            " any free port"
        ) from error
    host = f"[{address}]" if ":" in address else address  # IPv6's, in an address of the web
    print(f"torchestra metrics: http://{host}:{server.server_port}/metrics", flush=True)
    try:
        with Interrupts() as interrupts:
            while thread.is_alive():
                interrupts.wait(_LOOK_SECONDS)
    finally:
        server.shutdown()
        server.server_close()
