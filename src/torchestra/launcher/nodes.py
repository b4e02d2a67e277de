"""Several launchers that start one job, one on each host: ``torchestra run --nnodes``.

They meet in a store that the launcher of node 0 serves, which is the job's store as well. There each says
who it is and how many ranks it starts; so all know which ranks are whose. The first launcher whose ranks fail
says so, and the others end theirs. That of node 0 stays until the others have ended, or have been silent for
long::

    job        what the first launcher to come says of the job: how many nodes, which torchestra
    node/K     who the launcher of node K is, how many ranks it starts, and a port there that nobody uses, for
               programs that use torch.distributed; of two launchers, the one that came later
    members    what stood under all node/K when all had come, as the first to see that read it
    failed     which node failed first, its exit code and why
    failures   how many ranks have failed, on all nodes, where the job may go on without some
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
"""For node 0 to reach the store that it serves itself. If it does not, the address is not its host's."""
_LOOK_SECONDS = 1.0
_NOTICE_AFTER_S = 5.0
_LISTEN_SECONDS = 1.0
_SILENT_SECONDS = 10.0
_REST_SECONDS = 0.2
_LONGEST_LOOK = 1.0


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises:
        InvalidArgumentError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgumentError(f"--rendezvous must be host:port, got {text!r}")
    return host.strip("[]"), int(port)


class Nodes:
    """One launcher among several; the constructor returns when all have come.

    Args:
        nnodes, node: how many there are, and which this one is.
        rendezvous: ``host:port`` of node 0, where its launcher listens.
        nproc: how many ranks this one starts.
        port: of this host, which nobody else uses.

    Attributes:
        first_rank: the number of this node's first rank.
        world_size: how many ranks there are on all nodes.
        other: the failure of another node, once there is one.
        one_too_many: the failure here that was, of those on all nodes, the first not to be survived.
        when_failed: called, on another thread, when ``other`` or ``one_too_many`` is there.

    Raises:
        InvalidArgumentError: the numbers make no sense, the launchers have no secret, another one is the same
            node, or they disagree on the number of nodes or are of different versions of torchestra.
        StoreTimeoutError, DistNetworkError: not all launchers came within ten minutes.
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
        """Return the launchers' words about themselves, by node, once all have come."""
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
        """Make sure that the launchers are of one job, and of one torchestra."""
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
        """Wait for all launchers; after a moment, say for whom."""
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
        """Return the environment of this node's ranks, given the one they would have if it were alone."""
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
        """Call a function once there is a failure for which this node's ranks are to end; perhaps twice."""
        self.when_failed = when_failed
        if self.other is not None or self.one_too_many is not None:
            when_failed()

    def report_failure(self, code: int, why: str) -> None:
        """Have the other nodes end, because this one has failed."""
        if self.other is None:
            with contextlib.suppress(DistError, OSError):
                self._store.compare_set("failed", "", json.dumps([self.node, code, why]))

    def count_failure(self, failed: FailedRank, most: int) -> None:
        """Count a failure here among those of all nodes; notify if it was one too many.

        The store may be slow or gone, and the caller has ranks to look after: so a thread asks it.

        Args:
            most: how many the job may survive; one rank at least must end well.
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
        """Wait for the answers on all failures that were counted."""
        for thread in self._counting:
            thread.join(_SILENT_SECONDS)

    def close(self) -> None:
        """Leave; on node 0, once the others have ended, or have been silent for long."""
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
        """Wait for the others; time in which this process, and the store in it, was stopped is no silence."""
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
        """Take a failure that came after the ranks of this node had ended: it is the job's all the same."""
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
                    unanswered = True  # perhaps both were stopped: then there is an answer now
                    continue
                node, code, why = 0, 1, f"its launcher at {self._host} has ended, or is not reached ({error})"
            if node != self.node:
                self.other = NodeFailure(node, code, why)
                self.when_failed()
            return

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
