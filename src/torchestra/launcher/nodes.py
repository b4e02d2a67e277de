"""Several launchers that start one job, one on each host: ``torchestra run --nnodes``.

They meet in a store that the launcher of node 0 serves, which is the job's store as well. There each
registers itself and the number of its ranks, so that all know which node has which ranks. The first launcher
whose ranks fail reports it, and the others end theirs. The launcher of node 0 stays until the others have
ended, or have been silent for long::

    job        the first launcher's description of the job: how many nodes, which torchestra
    node/K     the identity of node K's launcher, how many ranks it starts, and an unused port there, for
               programs that use torch.distributed; of two launchers of node K, the later's
    members    the values of all node/K once all are present, as read by the first launcher that sees this
    failed     which node failed first, its exit code and why
    failures   how many ranks have failed on all nodes, if the job may go on without some
    done/K     node K has ended
    heartbeat/K  a count: the launcher of node K lives
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torchestra
from torchestra.errors import DistError, DistNetworkError, InvalidArgumentError, StoreTimeoutError
from torchestra.launcher.root_cause import FailedRank, NodeFailure
from torchestra.store import PrefixStore, Store, TCPStore, TCPStoreServer
from torchestra.store.base import nap
from torchestra.store.process import ProcessIdentity
from torchestra.store.secret import SECRET_ADVICE, SECRET_VARIABLE
from torchestra.system.deadline import RunningClock

_MEET_SECONDS = 600.0
_OWN_SECONDS = 30.0
"""The time for node 0 to reach its own store. If it does not, the address is not that of its host."""
_LOOK_SECONDS = 1.0
_NOTICE_AFTER_S = 5.0
_LISTEN_SECONDS = 1.0
_SILENT_SECONDS = 10.0
_REST_SECONDS = 0.2
_LONGEST_LOOK = 1.0


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises:
        InvalidArgumentError: the text is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgumentError(f"--rendezvous must be host:port, got {text!r}")
    return host.strip("[]"), int(port)


class Nodes:
    """One launcher among several; the constructor returns when all have registered.

    Args:
        nnodes, node: how many nodes there are, and the number of this one.
        rendezvous: ``host:port`` of node 0, where its launcher listens.
        nproc: how many ranks this launcher starts.
        port: an unused port of this host.

    Attributes:
        first_rank: the number of this node's first rank.
        world_size: how many ranks there are on all nodes.
        other: the failure of another node, once there is one.
        one_too_many: the failure here with which the failures on all nodes exceeded the limit.
        when_failed: called, on another thread, when ``other`` or ``one_too_many`` is set.

    Raises:
        InvalidArgumentError: the numbers make no sense, the launchers have no secret, another one has the
            same node number, or they disagree on the number of nodes or the version of torchestra.
        StoreTimeoutError, DistNetworkError: not all launchers registered within ten minutes.
    """

    def __init__(self, nnodes: int, node: int, rendezvous: str, nproc: int, port: int) -> None:
        if not 0 <= node < nnodes:
            raise InvalidArgumentError(f"--node-rank must be from 0 to {nnodes - 1}, got {node}")
        if not os.environ.get(SECRET_VARIABLE):
            raise InvalidArgumentError(f"ranks on several hosts must know each other: {SECRET_ADVICE}")
        self.node, self.nnodes = node, nnodes
        self._host, self._port = parse_rendezvous(rendezvous)
        self._server = TCPStoreServer(self._host, self._port) if node == 0 else None
        self.other: NodeFailure | None = None
        self.one_too_many: FailedRank | None = None
        self._counting: list[threading.Thread] = []
        self.when_failed: Callable[[], object] = lambda: None
        self._closed = threading.Event()
        try:
            self._store = self._connect(rendezvous)
            members = self._meet(rendezvous, nproc, port)
        except BaseException:
            self._close_server()
            raise
        counts = [int(member["nproc"]) for member in members]
        self.first_rank, self.world_size = sum(counts[:node]), sum(counts)
        self._port_for_torch = str(members[0]["port"])
        self._thread = threading.Thread(target=self._listen, name="torchestra-nodes", daemon=True)
        self._thread.start()

    def _connect(self, rendezvous: str) -> Store:
        limit = _MEET_SECONDS if self._server is None else _OWN_SECONDS
        try:
            joint = TCPStore(self._host, self._port, timeout=limit)
        except DistNetworkError as error:
            raise DistNetworkError(
                f"{error} (The launcher with --node-rank 0 listens at --rendezvous {rendezvous}; is that an"
                " address of its host?)"
            ) from error
        joint.set_timeout(_MEET_SECONDS)
        return PrefixStore("launchers", joint)

    def _meet(self, rendezvous: str, nproc: int, port: int) -> list[dict[str, Any]]:
        """Return the entries of the launchers, by node, once all have registered."""
        mine = {
            "who": str(ProcessIdentity.current()),
            "token": secrets.token_hex(8),
            "nproc": nproc,
            "port": port,
        }
        self._agree_on_job(mine)
        key = f"node/{self.node}"
        self._store.set(key, json.dumps(mine))
        try:
            self._await_all(rendezvous, key, mine)
            texts = self._store.multi_get([f"node/{other}" for other in range(self.nnodes)])
            first = self._store.compare_set("members", "", json.dumps([json.loads(text) for text in texts]))
        except KeyboardInterrupt:
            with contextlib.suppress(DistError, OSError):
                self._store.delete_key(key)
            raise
        members: list[dict[str, Any]] = json.loads(first)
        self._check_unique(mine, members[self.node])
        return members

    def _agree_on_job(self, mine: Mapping[str, Any]) -> None:
        """Check that the launchers belong to one job and have one version of torchestra."""
        job = {"nnodes": self.nnodes, "torchestra": torchestra.__version__}
        first = json.loads(self._store.compare_set("job", "", json.dumps({**job, "node": self.node, **mine})))
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

    def _await_all(self, rendezvous: str, key: str, mine: Mapping[str, Any]) -> None:
        """Wait for all launchers; after a moment, print which are missing."""
        clock, noticed = RunningClock(_LONGEST_LOOK), False
        while True:
            try:
                self._store.wait([f"node/{other}" for other in range(self.nnodes)], _LOOK_SECONDS)
                return
            except StoreTimeoutError:
                waited = clock.elapsed()
            if self._store.check([key]):
                self._check_unique(mine, json.loads(self._store.get(key)))
            if waited > _MEET_SECONDS or (waited > _NOTICE_AFTER_S and not noticed):
                late = [other for other in range(self.nnodes) if not self._store.check([f"node/{other}"])]
                named = f"node{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                if waited > _MEET_SECONDS:
                    raise StoreTimeoutError(
                        f"the launchers of {named} did not come to {rendezvous} within {_MEET_SECONDS:g} s"
                    )
                noticed = True
                print(f"torchestra run: waiting for {named} to come to {rendezvous}", file=sys.stderr)

    def _check_unique(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        if theirs != mine:
            raise InvalidArgumentError(
                f"two launchers are node {self.node}: {mine['who']}, and {theirs['who']}; every host needs a"
                " --node-rank of its own"
            )

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of this node's ranks, given the one they would have on a single node."""
        named = f"[{self._host}]" if ":" in self._host else self._host
        return {
            **own,
            "WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self._host,
            "MASTER_PORT": self._port_for_torch,
            "TORCHESTRA_STORE": f"{named}:{self._port}",
        }

    def notify(self, when_failed: Callable[[], object]) -> None:
        """Call a function, perhaps twice, once there is a failure that is to end this node's ranks."""
        self.when_failed = when_failed
        if self.other is not None or self.one_too_many is not None:
            when_failed()

    def report_failure(self, code: int, why: str) -> None:
        """Make the other nodes end, because this one has failed."""
        if self.other is None:
            with contextlib.suppress(DistError, OSError):
                self._store.compare_set("failed", "", json.dumps([self.node, code, why]))

    def count_failure(self, failed: FailedRank, most: int) -> None:
        """Count a failure here among those of all nodes; notify if it exceeds the limit.

        A thread asks the store, which may be slow or gone, while the caller looks after its ranks.

        Args:
            most: how many failures the job may survive; at least one rank must end well.
        """
        thread = threading.Thread(
            target=self._count, args=(failed, most), name="torchestra-failures", daemon=True
        )
        self._counting.append(thread)
        thread.start()

    def _count(self, failed: FailedRank, most: int) -> None:
        with contextlib.suppress(DistError, OSError):
            if self._store.add("failures", 1) > min(most, self.world_size - 1):
                self.one_too_many = failed
                self.when_failed()

    def finish_counting(self) -> None:
        """Wait for the store's answers on all counted failures."""
        for thread in self._counting:
            thread.join(_SILENT_SECONDS)

    def close(self) -> None:
        """Leave the job; on node 0, after the others have ended or have been silent for long."""
        self._closed.set()
        try:
            with contextlib.suppress(DistError, OSError):
                self._store.set(f"done/{self.node}", b"")
                if self.node == 0:
                    self._await_the_others()
                    self._look_for_failure()
        finally:
            self._close_server()

    def _await_the_others(self) -> None:
        """Wait for the others; time while this process, and so its store, was stopped is not silence."""
        beats: dict[int, bytes] = {}
        since: dict[int, float] = {}
        waiting = set(range(1, self.nnodes))
        clock = RunningClock(_LONGEST_LOOK)
        while waiting:
            now = clock.elapsed()
            for other in tuple(waiting):
                key = f"heartbeat/{other}"
                beat = self._store.get(key) if self._store.check([key]) else b""
                if beats.get(other) != beat:
                    beats[other], since[other] = beat, now
                if self._store.check([f"done/{other}"]) or now - since[other] > _SILENT_SECONDS:
                    waiting.discard(other)
            if waiting:
                nap(_REST_SECONDS)

    def _look_for_failure(self) -> None:
        """Note a failure that came after this node's ranks had ended: the job has failed all the same."""
        if self.other is None and self._store.check(["failed"]):
            node, code, why = json.loads(self._store.get("failed"))
            if node != self.node:
                self.other = NodeFailure(node, code, why)

    def _listen(self) -> None:
        """Send heartbeats, and wait for the failure of another node."""
        store = self._store.clone()
        store.set_timeout(_SILENT_SECONDS)
        count, unanswered = 0, False
        while not self._closed.is_set():
            try:
                count += 1
                store.set(f"heartbeat/{self.node}", str(count))
                store.wait(["failed"], _LISTEN_SECONDS)
                node, code, why = json.loads(store.get("failed"))
            except StoreTimeoutError:
                unanswered = False
                continue
            except DistNetworkError as error:
                if self._closed.is_set():
                    return
                if isinstance(error.__cause__, TimeoutError) and not unanswered:
                    unanswered = True  # perhaps both processes were stopped: then the next try is answered
                    continue
                node, code, why = 0, 1, f"its launcher at {self._host} has ended, or is not reached ({error})"
            if node != self.node:
                self.other = NodeFailure(node, code, why)
                self.when_failed()
            return

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
