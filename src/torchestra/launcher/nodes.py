"""Several launchers that start one job, one on each host: ``torchestra run --nnodes``.

They meet in a store that the launcher of node 0 serves. With three nodes or more, or two and a spare host, it
is used for no more than that: then the job's store is replicated, so that it outlives node 0
(store_replica.py). There each registers itself and the number of its ranks, so that all know which node has
which ranks. The first launcher whose ranks fail reports it, and the others end theirs. The launcher of node 0
stays until the others have ended, or have been silent for long::

    job        the first launcher's description of the job: how many nodes, which torchestra
    node/K     the identity of node K's launcher, how many ranks it starts, an unused port there, for programs
               that use torch.distributed, and where it serves a replica of the store, if it does; of two
               launchers of node K, the later's
    members    the values of all node/K once all are present, as read by the first launcher that sees this
    failed     which node failed first, its exit code and why
    failures   how many ranks have failed on all nodes, if the job may go on without some
    spare      where the first spare host would serve a replica, if there are two nodes and spares
    done/K     node K has ended
    heartbeat/K  a count: the launcher of node K lives

In an elastic job the others go on when a node is lost, and another launcher may take its place: see
node_ranks.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torchestra
from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    InvalidArgumentError,
    StoreTimeoutError,
)
from torchestra.launcher.launcher_rendezvous import MEET_SECONDS, LauncherRendezvous
from torchestra.launcher.node_ranks import REST_SECONDS, LauncherDetector, NodeRanks, later_launchers
from torchestra.launcher.node_records import read_failure, read_job, read_members, replicas_of
from torchestra.launcher.root_cause import FailedRank, NodeFailure
from torchestra.launcher.store_replica import SPARE_SECONDS, needs_spare, replica_count, replica_listener
from torchestra.store import PrefixStore, ReplicatedStore, Store
from torchestra.store.base import interruptible_sleep
from torchestra.store.process import ProcessIdentity
from torchestra.store.replicated import ReplicaListener
from torchestra.store.secret import SECRET_ADVICE, SECRET_VARIABLE
from torchestra.system.deadline import RunningClock
from torchestra.system.interrupts import Interrupts

_POLL_SECONDS = 1.0
_SILENT_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2 * _SILENT_SECONDS
"""How long a launcher waits for the store's answers once it has ranks: a lost host may have served it."""
_NOTICE_AFTER_S = 5.0
_LISTEN_SECONDS = 1.0
_LONGEST_INTERVAL_S = 1.0


class Nodes:
    """One launcher among several; the constructor returns when all have registered.

    Args:
        nnodes, node: how many nodes there are, and the number of this one; from ``nnodes`` on it is a spare.
        rendezvous: ``host:port`` of node 0, where its launcher listens, and of other nodes, where launchers
            that come later find the job (see launcher_rendezvous.py).
        nproc: how many ranks this launcher starts.
        port: an unused port of this host.
        least: how many members an elastic job needs; None for a job that ends with the first lost node.
        spares: how many nodes more than ``nnodes`` may wait to take a lost one's place.

    Attributes:
        first_rank: the number of this node's first rank.
        world_size: how many ranks there are on all nodes.
        other: the failure of another node, once there is one.
        exceeding_failure: the failure here with which the failures on all nodes exceeded the limit.
        node_rank: the node whose ranks this launcher has; not ``node`` if it took a lost one's place;
            None if the job ended before there was one to take.
        joins: whether its ranks are to join a job that runs.
        nproc: how many ranks it has.
        members: how many members of an elastic job it has; the caller says so.
        when_failed: called, on another thread, when ``other`` or ``exceeding_failure`` is set.
        when_ending: called, on another thread, when ranks have ended well elsewhere in an elastic job.

    Raises:
        InvalidArgumentError: the numbers make no sense, the launchers have no secret, another one has the
            same node number, or they disagree on the number of nodes or the version of torchestra.
        StoreTimeoutError, DistNetworkError: not all launchers registered within ten minutes.
    """

    def __init__(
        self,
        nnodes: int,
        node: int,
        rendezvous: str,
        nproc: int,
        port: int,
        least: int | None = None,
        spares: int = 0,
    ) -> None:
        if not 0 <= node < nnodes + spares:
            raise InvalidArgumentError(f"--node-rank must be from 0 to {nnodes + spares - 1}, got {node}")
        if not os.environ.get(SECRET_VARIABLE):
            raise InvalidArgumentError(
                f"ranks on several hosts need a secret to authenticate each other: {SECRET_ADVICE}"
            )
        self.node, self.nnodes = node, nnodes
        self._has_spares = least is not None and spares > 0
        self._rendezvous = LauncherRendezvous(rendezvous, replica_count(nnodes, self._has_spares), node)
        self._replica: ReplicaListener | None = None
        self._replicated: ReplicatedStore | None = None
        self.other: NodeFailure | None = None
        self.exceeding_failure: FailedRank | None = None
        self._asking: list[threading.Thread] = []
        self.when_failed: Callable[[], object] = lambda: None
        self.when_ending: Callable[[], object] = lambda: None
        self.node_rank: int | None = node
        self.joins, self.members, self._least = False, nproc, least
        self._name = str(node)
        self._closed = threading.Event()
        try:
            self._store = self._rendezvous.store
            if self._rendezvous.is_begun and least is None:
                raise InvalidArgumentError(
                    f"the job at {rendezvous} has begun without node {node}; nodes come later only with"
                    " --elastic"
                )
            late = least is not None and (node >= nnodes or self._store.check(["members"]))
            members = self._take_lost_place() if late else self._meet(rendezvous, nproc, port)
        except BaseException:
            self._close_servers()
            raise
        if self.node_rank is None:
            return
        counts = [int(member["nproc"]) for member in members]
        self.nproc, self.first_rank, self.world_size = (
            counts[self.node_rank],
            sum(counts[: self.node_rank]),
            sum(counts),
        )
        self._port_for_torch = str(members[0]["port"])
        ranks = counts if least is not None else None
        self._store.set_timeout(_LAST_WORDS_SECONDS)
        for target, arguments in ((self._send_heartbeats, ()), (self._listen, (ranks,))):
            name = "torchestra-nodes"
            threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _meet(self, rendezvous: str, nproc: int, port: int) -> list[dict[str, Any]]:
        """Return the entries of the launchers, by node, once all have registered."""
        mine = {
            "who": str(ProcessIdentity.current()),
            "token": secrets.token_hex(8),
            "nproc": nproc,
            "port": port,
        }
        self._agree_on_job(mine)
        if self.node < replica_count(self.nnodes, self._has_spares):
            self._replica = replica_listener(self._store)
            mine["store"] = self._replica.address
        key = f"node/{self.node}"
        self._store.set(key, json.dumps(mine))
        try:
            with Interrupts() as interrupts:
                self._await_all(rendezvous, key, mine, interrupts)
            texts = self._store.multi_get([f"node/{other}" for other in range(self.nnodes)])
            entries = [json.loads(text) for text in texts]
            if needs_spare(self.nnodes) and self._has_spares:
                self._add_spare(entries)
            first = self._store.compare_set("members", "", json.dumps(entries))
        except KeyboardInterrupt:
            with contextlib.suppress(DistError, OSError):
                self._store.delete_key(key)
            raise
        members = read_members(first, self.nnodes)
        self._check_unique(mine, members[self.node])
        if self._replica is not None and not replicas_of(members):
            print(
                f"torchestra run: no spare host has come within {SPARE_SECONDS:g} s: the launcher of node"
                " 0 alone serves the job's store, which is lost with it",
                file=sys.stderr,
            )
        self._use_replicas(replicas_of(members), first.decode())
        return members

    def _add_spare(self, entries: list[dict[str, Any]]) -> None:
        """Have the first spare host serve a replica as well, if it is there; else have none served."""
        with contextlib.suppress(StoreTimeoutError):
            entries[-1]["spare"] = self._store.await_values(["spare"], SPARE_SECONDS)[0].decode()
            return
        for entry in entries:
            entry.pop("store", None)

    def _first_store(self) -> str:
        """Return where the launchers meet."""
        host, port = self._rendezvous.host, self._rendezvous.port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _use_replicas(self, addresses: Sequence[str], members: str) -> None:
        """Go on with the replicated store, if the launchers serve one.

        Args:
            members: the value of that key, for those that come later.
        """
        if not addresses:
            if self._replica is not None:
                self._replica.close()
                self._replica = None
            return
        self._rendezvous.announce(members)
        if self._replica is None:
            self._replica = replica_listener(self._store)
        if self._replica.address in addresses:
            self._replica.serve(addresses)
        self._store.close()
        self._replicated = ReplicatedStore(addresses, MEET_SECONDS)
        self._store = PrefixStore("launchers", self._replicated)

    def _look_after_replicas(self) -> None:
        """Replace a lost replica if none is served here; tell those that come later where all are."""
        if self._replica is not None and self._replicated is not None:
            index = self._replica.replace_lost(self._replicated)
            if index is not None:
                print(
                    f"torchestra run: node {self.node} replaces replica {index} of the job's store, which is"
                    " lost",
                    file=sys.stderr,
                )
            self._rendezvous.tell_replicas(self._replicated.addresses)

    def _take_lost_place(self) -> list[dict[str, Any]]:
        """Take the place of a lost node, waited for; return the entries of the launchers that began."""
        mine = {"who": str(ProcessIdentity.current()), "token": secrets.token_hex(8)}
        self._agree_on_job(mine)
        self._name, self.joins, self.members = f"{self.node}-{mine['token']}", True, 0
        print(f"torchestra run: node {self.node} waits to take the place of a lost node", file=sys.stderr)
        self._await_members()
        told = self._store.get("members")
        members = read_members(told, self.nnodes)
        self._use_replicas(self._rendezvous.replicas() or replicas_of(members), told.decode())
        node_ranks = NodeRanks(self._store, [int(each["nproc"]) for each in members], self._name)
        self.node_rank = node_ranks.wait(self.node, self._look_after_replicas)
        if self.node_rank is not None:
            print(
                f"torchestra run: node {self.node} takes the place of node {self.node_rank}", file=sys.stderr
            )
        elif self._store.check(["failed"]):
            self.other = read_failure(self._store.get("failed"))
        return members

    def _await_members(self) -> None:
        """Wait until a job has begun; offer to serve a replica of its store if it needs that."""
        if needs_spare(self.nnodes) and self.node >= self.nnodes and not self._store.check(["members"]):
            self._replica = replica_listener(self._store)
            self._store.compare_set("spare", "", self._replica.address)
        try:
            with Interrupts() as interrupts:
                while not self._store.check(["members"]):
                    interrupts.wait(REST_SECONDS)
        except KeyboardInterrupt:
            with contextlib.suppress(DistError, OSError):
                if self._replica is not None and self._store.get("spare") == self._replica.address.encode():
                    self._store.delete_key("spare")
            raise

    def _agree_on_job(self, mine: Mapping[str, Any]) -> None:
        """Check that the launchers belong to one job and have one version of torchestra."""
        job = {"nnodes": self.nnodes, "torchestra": torchestra.__version__}
        first = read_job(self._store.compare_set("job", "", json.dumps({**job, "node": self.node, **mine})))
        named = f"that of node {first['node']} ({first['who']})"
        if first["nnodes"] != self.nnodes:
            raise InvalidArgumentError(
                f"the launcher of node {self.node} has --nnodes {self.nnodes}, but {named} has --nnodes"
                f" {first['nnodes']}; all must have the same"
            )
        if first["torchestra"] != torchestra.__version__:
            raise InvalidArgumentError(
                f"node {self.node} has torchestra {torchestra.__version__}, but {named} is of version"
                f" {first['torchestra']}; install the same on all hosts"
            )

    def _await_all(self, rendezvous: str, key: str, mine: Mapping[str, Any], interrupts: Interrupts) -> None:
        """Wait for all launchers; after a moment, print which are missing."""
        clock, noticed = RunningClock(_LONGEST_INTERVAL_S), False
        while True:
            interrupts.check()
            try:
                self._store.wait([f"node/{other}" for other in range(self.nnodes)], _POLL_SECONDS)
                return
            except StoreTimeoutError:
                waited = clock.elapsed()
            if self._store.check([key]):
                self._check_unique(mine, json.loads(self._store.get(key)))
            if waited > MEET_SECONDS or (waited > _NOTICE_AFTER_S and not noticed):
                late = [other for other in range(self.nnodes) if not self._store.check([f"node/{other}"])]
                named = f"node{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                if waited > MEET_SECONDS:
                    raise StoreTimeoutError(
                        f"the launchers of {named} did not connect to {rendezvous} within {MEET_SECONDS:g} s"
                    )
                noticed = True
                print(f"torchestra run: waiting for {named} to connect to {rendezvous}", file=sys.stderr)

    def _check_unique(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        if theirs.get("token") != mine["token"]:
            raise InvalidArgumentError(
                f"two launchers are node {self.node}: {mine['who']}, and {theirs['who']}; every host needs a"
                " --node-rank of its own"
            )

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of this node's ranks, given the one they would have on a single node."""
        return {
            **own,
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self._rendezvous.host,
            "MASTER_PORT": self._port_for_torch,
            **self.store_variables(),
        }

    def store_variables(self) -> dict[str, str]:
        """Return the variable that tells ranks where the job's store is now."""
        replicas = () if self._replicated is None else self._replicated.addresses
        return {"TORCHESTRA_STORE": ",".join(replicas) or self._first_store()}

    def notify(self, when_failed: Callable[[], object]) -> None:
        """Call a function, perhaps twice, once there is a failure that is to end this node's ranks."""
        self.when_failed = when_failed
        if self.other is not None or self.exceeding_failure is not None:
            when_failed()

    def report_failure(self, code: int, why: str) -> None:
        """Make the other nodes end, because this one has failed."""
        if self.other is None:
            with contextlib.suppress(DistError, OSError):
                self._store.compare_set("failed", "", json.dumps([self.node, code, why]))

    def report_failure_soon(self, code: int, why: str) -> None:
        """Do :meth:`report_failure` on a thread."""
        self._ask_store(self.report_failure, code, why)

    def count_failure(self, failed: FailedRank, most: int) -> None:
        """Count a failure here among those of all nodes, on a thread; notify if it exceeds the limit.

        Args:
            most: how many failures the job may survive.
        """
        self._ask_store(self._count, failed, most)

    def _ask_store(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on a thread: the store may be slow or gone; the caller looks after its ranks."""
        thread = threading.Thread(target=function, args=args, name="torchestra-failures", daemon=True)
        self._asking.append(thread)
        thread.start()

    def _count(self, failed: FailedRank, most: int) -> None:
        with contextlib.suppress(DistError, OSError):
            if self._store.add("failures", 1) > most:
                self.exceeding_failure = failed
                self.when_failed()

    def finish_asking(self) -> None:
        """Wait for the store's answers on all failures that were told or counted."""
        for thread in self._asking:
            thread.join(_SILENT_SECONDS)

    def close(self) -> None:
        """Leave the job; if the store is served here, after the others have ended or been silent for long."""
        self._closed.set()
        try:
            with contextlib.suppress(DistError, OSError):
                if self._least is not None and self.other is None and not self._store.check(["failed"]):
                    self._store.set("ended", b"")
                self._store.set(f"done/{self._name}", b"")
                if self._rendezvous.server is not None or (
                    self._replica is not None and self._replica.serves
                ):
                    self._await_the_others()
                    self._read_failure()
        finally:
            self._close_servers()

    def _await_the_others(self) -> None:
        """Wait for the others; time while this process, and so its store, was stopped is not silence."""
        detector = LauncherDetector(self._store)
        waiting = {*map(str, range(self.nnodes)), *later_launchers(self._store)} - {self._name}
        while waiting:
            for other in tuple(waiting):
                if self._store.check([f"done/{other}"]) or detector.is_silent(other):
                    waiting.discard(other)
            if waiting:
                interruptible_sleep(REST_SECONDS)

    def _read_failure(self) -> None:
        """Note a failure that came after this node's ranks had ended: the job has failed all the same."""
        if self.other is None and self._store.check(["failed"]):
            failure = read_failure(self._store.get("failed"))
            if failure.node != self.node:
                self.other = failure

    @property
    def _pause(self) -> float:
        return _LISTEN_SECONDS if self._least is None else min(_LISTEN_SECONDS, heartbeat_bound() / 4)

    def _send_heartbeats(self) -> None:
        """Say again and again that this launcher lives; who waits for the others is told by :meth:`_listen`.

        It has a thread of its own: what the other asks the store are some ten requests, one after another.
        Over a slow network these would last as long as a launcher may be silent.
        """
        store = self._store.clone()
        store.set_timeout(_SILENT_SECONDS)
        count = 0
        while not self._closed.is_set():
            count += 1
            with contextlib.suppress(DistError, OSError):
                store.set(f"heartbeat/{self._name}", f"{count} {self.members}")
            self._closed.wait(self._pause)

    def _listen(self, ranks: list[int] | None = None) -> None:
        """Wait for the failure of another node.

        Args:
            ranks: of an elastic job, how many each node has.
        """
        store = self._store.clone()
        node_ranks = None if ranks is None else NodeRanks(store, ranks, self._name)
        store.set_timeout(_SILENT_SECONDS)
        timed_out, lost = False, False
        while not self._closed.is_set():
            try:
                if store.check(["ended"]):  # a store that has not answered this for long is lost
                    self.when_ending()
                if node_ranks is not None and self._is_over(node_ranks, store):
                    return
                self._look_after_replicas()
                store.wait(["failed"], self._pause)
                node, code, why = read_failure(store.get("failed"))
            except StoreTimeoutError:
                timed_out = False
                continue
            except DistNetworkError as error:
                if self._closed.is_set():
                    return
                if isinstance(error.__cause__, TimeoutError) and not timed_out:
                    timed_out = True  # perhaps both processes were stopped: then the next try is answered
                    continue
                where = self._rendezvous.host
                node, code, why = 0, 1, f"its launcher at {where} has ended, or is not reached ({error})"
                if self._replicated is not None:
                    node, why = self.node, f"the job's store is lost: {error}"
                    lost = True
            except DistStoreError as error:  # something has failed, or another job uses this store
                node, code, why, lost = self.node, 1, str(error), True
            if lost or node != self.node:
                self.other = NodeFailure(node, code, why)
                self.when_failed()
            return

    def _is_over(self, node_ranks: NodeRanks, store: Store) -> bool:
        """Look after an elastic job; return whether this node's ranks are to end."""
        assert self.node_rank is not None
        if not node_ranks.is_mine(self.node_rank):
            why = "it was silent for long, and another launcher has taken its place"
            self.other = NodeFailure(self.node_rank, 1, why)
            self.when_failed()
            return True
        if (
            self._least is not None
            and node_ranks.is_first(self.node_rank)
            and (left := node_ranks.members()) < self._least
        ):
            why = f"of the job's members {left} are left on all hosts, and --elastic needs {self._least}"
            store.compare_set("failed", "", json.dumps([self.node, 1, why]))
            self.other = NodeFailure(self.node, 1, why)
            self.when_failed()
            return True
        return False

    def _close_servers(self) -> None:
        if self._replica is not None:
            self._replica.close()
        self._rendezvous.close()
