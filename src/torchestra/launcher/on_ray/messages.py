"""The messages between launcher and actors: plain data, sent by Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from torchestra.launcher.spec import Ended, Failure, PhaseReached


@dataclass(frozen=True)
class ActorInfo:
    """The node of an actor, and its resources.

    Attributes:
        node: Ray's name of the node.
        host: the host's name.
        address: the node's IP address.
        gpus: the GPUs that Ray gave the actor.
        cluster: the address at which rank programs reach the same cluster.
        version: the version of torchestra installed there.
    """

    node: str
    host: str
    address: str
    gpus: tuple[str, ...]
    cluster: str
    version: str


@dataclass(frozen=True)
class Started:
    """The rank has a process."""

    pid: int


@dataclass(frozen=True)
class Printed:
    """The rank wrote to its standard output (stream 0) or error (1); empty: it closed the stream."""

    stream: int
    data: bytes


@dataclass(frozen=True)
class ResultChunk:
    """Some of the pickled result; ``last`` says that it ends here, and that the function has returned."""

    data: bytes
    last: bool


Event = Union[Started, Printed, ResultChunk, PhaseReached, Failure, Ended]


@dataclass(frozen=True)
class EventBatch:
    """The events of a rank since the last call.

    Attributes:
        first: the index of the first event, counted from the actor's beginning.
        events: in order; empty when nothing happened for a while. Nothing follows an
            :class:`~torchestra.launcher.spec.Ended`.
        clock: ``time.monotonic()`` of the actor's host, the clock of the events' times.
        replicas: where those of the job's store are now, as far as the actor has heard.
    """

    first: int
    events: tuple[Event, ...]
    clock: float
    replicas: tuple[str, ...] = ()
