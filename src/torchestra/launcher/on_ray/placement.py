"""The placement of ranks on a Ray cluster: a bundle for each, and an actor in each bundle."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torchestra
from torchestra.errors import DistError, LaunchTimeoutError, NotReadyError
from torchestra.launcher.on_ray.actor import CONCURRENT_CALLS, RankActor
from torchestra.launcher.on_ray.messages import ActorInfo
from torchestra.launcher.on_ray.options import RayOptions
from torchestra.types import timeout_seconds

_SLICE_S = 0.1
"""How long the main thread is in Ray at a time, because Ctrl-C has no effect there."""
_NOTICE_AFTER_S = 3.0
_CLOSE_S = 5.0
_CONNECT_S = 5.0


class Cluster:
    """A connection to a Ray cluster: this process's, or a new one that :meth:`close` ends.

    Raises:
        NotReadyError: Ray is not installed.
        DistError: the cluster cannot be reached.
    """

    def __init__(self, options: RayOptions) -> None:
        try:
            import ray
        except ImportError as error:
            raise NotReadyError(
                f"on='ray' needs Ray, which is not installed ({error}): pip install 'torchestra[ray]'"
            ) from error
        self.ray: Any = ray
        self._options = options
        self._own = not ray.is_initialized()
        if self._own:
            address = options.address or os.environ.get("RAY_ADDRESS")
            _check_reachable(address)
            environment = None if options.runtime_env is None else dict(options.runtime_env)
            try:
                ray.init(
                    options.address, runtime_env=environment, log_to_driver=False, logging_level="warning"
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                place = f" at {address}" if address else ""
                raise DistError(f"no connection to a Ray cluster{place}: {error}") from error

    def ranks_at_most(self) -> int:
        """Return how many ranks the whole cluster can hold: the value of ``"auto"``."""
        there = self.ray.cluster_resources()
        fit = (int(there.get(resource, 0) // amount) for resource, amount in self._options.bundle.items())
        return max(1, min(fit))

    def place(self, ranks: int, spares: int = 0) -> Placement:
        """Return places for ``ranks`` ranks, and so many more for replacements.

        Raises:
            LaunchTimeoutError: the cluster did not provide them in time.
            DistError: an actor could not start.
        """
        # If torchestra connected to the cluster, the connection already has the runtime environment.
        environment = None if self._own else self._options.runtime_env
        return Placement(self.ray, self._options, ranks, environment, spares)

    def close(self) -> None:
        """Disconnect from the cluster, if this object connected."""
        if self._own:
            self.ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Fail at once if no process listens there; Ray itself would retry for half a minute or for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise DistError(f"no connection to a Ray cluster at {address}: {error}") from error


class HeldActor(NamedTuple):
    """An actor that answers.

    Attributes:
        actor: a handle on the :class:`RankActor`.
        info: its node and resources.
        bundle: the number of its bundle.
    """

    actor: Any
    info: ActorInfo
    bundle: int


class PlacedRank(NamedTuple):
    """The place of one rank.

    Attributes:
        held: its actor.
        local_rank, local_size: its number among the ranks on the same node, and how many they are.
        node: the node's number.
    """

    held: HeldActor
    local_rank: int
    local_size: int
    node: int

    @property
    def actor(self) -> Any:
        """Return the handle on its actor."""
        return self.held.actor

    @property
    def info(self) -> ActorInfo:
        """Return its actor's node and resources."""
        return self.held.info


class Placement:
    """One actor per rank, each holding its resources until :meth:`close`. See :meth:`Cluster.place`.

    Ranks are numbered node by node, in the order of the bundles.

    Attributes:
        ranks_placed: the place of each rank.
        spares: actors that no rank has taken yet.
    """

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        ranks: int,
        runtime_env: Mapping[str, Any] | None,
        spares: int = 0,
    ) -> None:
        self.ray = ray
        self.ranks_placed: list[PlacedRank] = []
        self.spares: list[HeldActor] = []
        self._options = options
        self._ranks, self._spares = ranks, spares
        self._more = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
        self._actors: list[Any] = []  # by bundle
        self._nodes: list[str] = []  # by the numbers that nodes have in this job
        self._deadline = time.monotonic() + timeout_seconds(options.placement_timeout)
        self._group = ray.util.placement_group([options.bundle] * (ranks + spares), strategy=options.strategy)
        try:
            self._await_group()
            self._actors = [self._start_actor(bundle) for bundle in range(ranks + spares)]
            refs = [actor.info.remote() for actor in self._actors]
            self._number(self.call(refs, "start the actors of the ranks"))
        except BaseException:
            self.close()
            raise

    def call(self, refs: Sequence[Any], purpose: str) -> list[Any]:
        """Return the results of calls to actors.

        Raises:
            LaunchTimeoutError: not all results came before the placement's deadline.
            DistError: one of them failed, or its actor did.
        """
        waiting = list(refs)
        while waiting:
            if time.monotonic() > self._deadline:
                raise LaunchTimeoutError(
                    f"launch: Ray did not {purpose} within {self._seconds:g} s: {len(waiting)} of"
                    f" {len(refs)} are missing; raise placement_timeout if the nodes are only slow"
                )
            _, waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=_SLICE_S)
        try:
            return list(self.ray.get(list(refs)))
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, DistError) else None
            raise DistError(f"launch: Ray could not {purpose}: {cause or error}") from error
        except self.ray.exceptions.RayError as error:
            raise DistError(
                f"launch: Ray could not {purpose}; torchestra {torchestra.__version__} must be installed on"
                f" every node, or come with runtime_env: {error}"
            ) from error

    def another_actor(self, bundle: int) -> tuple[Any, int]:
        """Return an actor for a rank that has lost its own, and its bundle: a spare one, else a new one.

        A new one starts in the bundle of the lost one. If the bundle's node is gone, Ray starts it when there
        is room for the bundle on another.
        """
        self._kill(self._actors[bundle])
        if self.spares:
            spare = self.spares.pop(0)
            return spare.actor, spare.bundle
        self._actors[bundle] = self._start_actor(bundle)
        return self._actors[bundle], bundle

    def move(self, rank: int, held: HeldActor) -> PlacedRank:
        """Place a rank that has lost its actor at another."""
        self._check_versions([held.info])
        there = [
            placed
            for other, placed in enumerate(self.ranks_placed)
            if other != rank and placed.info.node == held.info.node
        ]
        local_rank = min(set(range(len(there) + 1)).difference(each.local_rank for each in there))
        placed = PlacedRank(held, local_rank, len(there) + 1, self._node_number(held.info))
        self.ranks_placed[rank] = placed
        return placed

    def _node_number(self, info: ActorInfo) -> int:
        if info.node not in self._nodes:
            self._nodes.append(info.node)
        return self._nodes.index(info.node)

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(actor)

    def close(self) -> None:
        """End the remaining ranks, their actors and the placement group."""
        ray = self.ray
        with contextlib.suppress(ray.exceptions.RayError):
            refs = [actor.close.remote() for actor in self._actors]
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_S) if refs else None
        for actor in self._actors:
            self._kill(actor)
        ray.util.remove_placement_group(self._group)

    @property
    def _seconds(self) -> float:
        return timeout_seconds(self._options.placement_timeout)

    def _await_group(self) -> None:
        notice_at = time.monotonic() + _NOTICE_AFTER_S
        while not self._group.wait(timeout_seconds=_SLICE_S):
            now = time.monotonic()
            if now > self._deadline:
                raise LaunchTimeoutError(
                    f"launch: Ray had no place for the ranks within {self._seconds:g} s: {self._demand()};"
                    " ask for less, or raise placement_timeout if there will be more"
                )
            if now > notice_at:
                notice_at = math.inf
                print(f"torchestra: waiting for Ray: {self._demand()}", file=sys.stderr, flush=True)

    def _demand(self) -> str:
        options, ranks, spares = self._options, self._ranks, self._spares
        all_there, free = self.ray.cluster_resources(), self.ray.available_resources()
        nodes = sum(1 for node in self.ray.nodes() if node["Alive"])
        demand = " and ".join(f"{amount:g} {resource}s" for resource, amount in options.bundle.items())
        there = " and ".join(
            f"{all_there.get(resource, 0):g} {resource}s of which {free.get(resource, 0):g} are free"
            for resource in options.bundle
        )
        wanted = f"{ranks} ranks and {spares} spare places" if spares else f"{ranks} ranks"
        return (
            f"{wanted} ask for {demand} each ({options.strategy}), and the cluster has {there},"
            f" on {nodes} node{'s' if nodes != 1 else ''}"
        )

    def _start_actor(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = self._options
        remote = self.ray.remote(RankActor)
        return remote.options(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
            **self._more,
        ).remote()

    def _number(self, infos: list[ActorInfo]) -> None:
        """Number the ranks node by node, in the order of the bundles; the last bundles are spare."""
        self._check_versions(infos)
        held = [HeldActor(self._actors[bundle], info, bundle) for bundle, info in enumerate(infos)]
        members: dict[str, list[HeldActor]] = {}
        for each in held[: self._ranks]:
            members.setdefault(each.info.node, []).append(each)
        self.spares = held[self._ranks :]
        self._nodes = list(members)
        self.ranks_placed = [
            PlacedRank(each, local_rank, len(together), node)
            for node, together in enumerate(members.values())
            for local_rank, each in enumerate(together)
        ]

    def _check_versions(self, infos: list[ActorInfo]) -> None:
        here = torchestra.__version__
        other = sorted({f"{info.version} on {info.host}" for info in infos if info.version != here})
        if other:
            raise DistError(f"launch: torchestra is {here} here and {', '.join(other)}; install one version")
