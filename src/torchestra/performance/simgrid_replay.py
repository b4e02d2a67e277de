"""Replay schedules on SimGrid, an independent simulator of distributed systems, to compare with.

SimGrid (Casanova and others 2014) shares links among messages by a fluid model, where this package's network
sends one message after the other; so agreement of the two says something. Its Python module is needed, as in
Debian's package python3-simgrid (3.32) or of PyPI (4.1): see https://simgrid.org.

Each stream becomes an actor, each host one with a link in either direction. Cores are not shared there, and
overheads of messages are time of the stream that sends or receives.
"""

from __future__ import annotations

import importlib
import multiprocessing
from bisect import bisect_left
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from torchestra.errors import DistError, InvalidArgumentError
from torchestra.performance.costs import Costs, StreamCosts
from torchestra.performance.machine import Machine
from torchestra.performance.schedule import (
    AwaitFlag,
    AwaitSignal,
    Begin,
    EventStream,
    Receive,
    Schedule,
    Send,
    SetFlag,
    Signal,
)

_CONFIGURATION = ("network/model:CM02", "network/TCP-gamma:0", "contexts/factory:thread", "root.thres:error")
"""Bandwidth and latency as given, without the corrections for TCP over gigabit Ethernet."""

_Key = tuple[object, ...]


def replay(schedule: Schedule, machine: Machine) -> float:
    """Return the seconds that a schedule takes on SimGrid. Runs in a process of its own: it is once in each.

    Raises:
        DistError: SimGrid's Python module is not installed.
        InvalidArgumentError: not every host has been recorded.
    """
    if schedule.stands_for_others is not None:
        raise InvalidArgumentError(
            f"SimGrid replays the schedule of every rank, and of {machine.ranks} ranks not every one is"
            " recorded; take fewer hosts"
        )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_replay, schedule, machine).result()


def _replay(schedule: Schedule, machine: Machine) -> float:
    try:
        simgrid = importlib.import_module("simgrid")
    except ImportError as error:
        raise DistError(
            f"SimGrid's Python module is needed for a replay on it ({error}): install PyPI's simgrid, or"
            " Debian's python3-simgrid for Debian's Python"
        ) from error
    arguments = [
        "replay",
        *(f"--cfg={each}" for each in _CONFIGURATION if "thres" not in each),
        "--log=root.thres:error",
    ]
    engine = simgrid.Engine(arguments)
    hosts = _platform(simgrid, engine, machine)
    replayed = _Replay(simgrid, schedule, machine)
    ends: list[float] = []
    for number, stream in enumerate(schedule.streams):

        def act(stream: EventStream = stream) -> None:
            replayed.act(stream)
            ends.append(engine.clock)

        host = hosts[stream.host]
        if hasattr(host, "add_actor"):  # since 4.1, as add_netzone_star() below
            host.add_actor(f"stream{number}", act)
        else:
            simgrid.Actor.create(f"stream{number}", host, act)
    engine.run()
    if len(ends) != len(schedule.streams):
        raise DistError(f"{len(schedule.streams) - len(ends)} streams wait for ever in SimGrid")
    return max(ends)


def _platform(simgrid: Any, engine: Any, machine: Machine) -> list[Any]:
    """Make a host for each host, with a link to the middle of a star; return them."""
    new = hasattr(simgrid.NetZone, "add_netzone_star")
    if new:
        zone = engine.netzone_root.add_netzone_star("hosts")
        add_host, add_link = zone.add_host, zone.add_split_duplex_link
    else:  # before 4.1
        zone = simgrid.NetZone.create_star_zone("hosts")
        add_host, add_link = zone.create_host, zone.create_split_duplex_link
    hosts = []
    for number in range(machine.hosts):
        host = add_host(f"host{number}", 1e9)
        hosts.append(host)
        if machine.link is not None:
            share = machine.slow_links.get(number, 1.0)
            link_class = machine.link.classes[-1]
            bandwidth = share / max(link_class.gap_per_byte_s, 1e-15)
            link = add_link(f"link{number}", bandwidth)
            link.set_latency(link_class.latency_s / 2).seal()
            up = simgrid.LinkInRoute(link, simgrid.LinkInRoute.UP)
            ends = (host, None) if new else (host.netpoint, None, None, None)
            zone.add_route(*ends, [up], True)
    zone.seal()
    return hosts


class _Replay:
    """Runs streams as actors."""

    def __init__(self, simgrid: Any, schedule: Schedule, machine: Machine) -> None:
        self._simgrid = simgrid
        self._machine = machine
        self._costs = Costs(machine)
        self._flags: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._released: defaultdict[_Key, list[Any]] = defaultdict(list)
        self._semaphores: dict[_Key, Any] = {}
        for stream in schedule.streams:
            values = [event.value for event in stream.events if isinstance(event, SetFlag)]
            self._flags[stream.host, stream.local_rank] += values
        for number, stream in enumerate(schedule.streams):
            for event in stream.events:
                if isinstance(event, AwaitFlag | AwaitSignal):
                    cause, own = self._cause(stream, event), (number, self._cause(stream, event))
                    if own not in self._semaphores:
                        self._semaphores[own] = simgrid.Semaphore(0)
                        self._released[cause].append(self._semaphores[own])
        self._numbers = {id(stream): number for number, stream in enumerate(schedule.streams)}

    def _cause(self, stream: EventStream, event: AwaitFlag | AwaitSignal) -> _Key:
        """Return which flag or signal ends a wait."""
        if isinstance(event, AwaitSignal):
            return "signal", stream.host, stream.local_rank, event.number
        index = bisect_left(self._flags[stream.host, event.local_rank], event.value)
        return "flag", stream.host, event.local_rank, index

    def act(self, stream: EventStream) -> None:
        """Be a stream; called on its actor."""
        me = self._simgrid.Actor.self()
        for event in stream.events:
            if isinstance(event, Receive):
                for other in event.hosts:
                    self._mailbox(other, stream.host, stream, event.tag).set_receiver(me)
        rank = stream.host * self._machine.ranks_per_host + stream.local_rank
        flags, costs = 0, StreamCosts(self._costs, rank)
        waited: set[_Key] = set()
        for event in stream.events:
            if isinstance(event, SetFlag):
                self._release(("flag", stream.host, stream.local_rank, flags))
                flags += 1
            elif isinstance(event, Signal):
                self._release(("signal", stream.host, stream.local_rank, event.number))
            elif isinstance(event, AwaitFlag | AwaitSignal):
                self._await(stream, event, waited, costs.factor)
            elif isinstance(event, Begin):
                costs.begin(event)
            elif isinstance(event, Send):
                self._send(stream, event, costs.factor)
            elif isinstance(event, Receive):
                self._receive(stream, event, costs.factor)
            elif seconds := costs.seconds_of(event):
                self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            self._simgrid.this_actor.sleep_for(seconds)

    def _release(self, cause: _Key) -> None:
        for semaphore in self._released[cause]:
            semaphore.release()

    def _await(
        self, stream: EventStream, event: AwaitFlag | AwaitSignal, waited: set[_Key], factor: float
    ) -> None:
        cause = self._cause(stream, event)
        if cause in waited:
            return
        waited.add(cause)
        engine = self._simgrid.Engine.instance
        before = engine.clock
        self._semaphores[self._numbers[id(stream)], cause].acquire()
        if engine.clock > before:
            host = self._machine.host
            self._sleep(factor * host.flag_s if isinstance(event, AwaitFlag) else host.wakeup_s)

    def _send(self, stream: EventStream, event: Send, factor: float) -> None:
        assert self._machine.link is not None
        link = self._machine.link.of(event.nbytes).times(factor)
        for other in event.hosts:
            self._sleep(link.send_overhead_s + event.nbytes * link.send_overhead_per_byte_s)
            mailbox = self._mailbox(stream.host, other, stream, event.tag)
            mailbox.put_init("", round(factor * event.nbytes)).detach()  # the link has one speed for all

    def _receive(self, stream: EventStream, event: Receive, factor: float) -> None:
        assert self._machine.link is not None
        link = self._machine.link.of(event.nbytes).times(factor)
        for other in event.hosts:
            self._mailbox(other, stream.host, stream, event.tag).get()
            self._sleep(link.receive_overhead_s + event.nbytes * link.receive_overhead_per_byte_s)

    def _mailbox(self, source: int, target: int, stream: EventStream, tag: int) -> Any:
        return self._simgrid.Mailbox.by_name(f"{source}.{target}.{stream.local_rank}.{tag}")
