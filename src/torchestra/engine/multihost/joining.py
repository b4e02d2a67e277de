"""How a rank enters a group whose ranks are on several hosts."""

from __future__ import annotations

import threading
import time

from torchestra.engine.joining import join
from torchestra.engine.local import LocalEngine
from torchestra.engine.multihost.bridge import Bridge
from torchestra.engine.multihost.crossing import Call, Crossing
from torchestra.engine.multihost.engine import MultiHostEngine
from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.multihost.messages import Messages
from torchestra.engine.multihost.opening import open_bridge
from torchestra.engine.multihost.warden import Outlook, Warden
from torchestra.engine.operations import Kind, pack
from torchestra.store import PrefixStore, Store

__all__ = ["join_hosts"]


def join_hosts(
    store: Store,
    hosts: Hosts,
    rank: int,
    name: str,
    seconds: float,
    *,
    threads: bool,
    thread: threading.Thread | None = None,
) -> MultiHostEngine:
    """Enter a group; returns when all ranks have. Must be called by every rank of the group.

    Args:
        store: a store that only the ranks of this group, and only for this purpose, use.
        hosts: where the ranks are; more than one host.
        rank: this one.
        name: of the group, for messages.
        seconds: how long to wait for the others.
        threads: whether the ranks are threads of this process.
        thread: the one that the rank's program runs in; default: the one that calls.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
        DistBackendError: there is no way to the other hosts.
    """
    deadline = time.monotonic() + seconds
    host, place = hosts.host_of[rank], hosts.place_of[rank]
    here = hosts.members[host]
    own = PrefixStore(f"host/{host}", store)
    member = join(own, place, len(here), name, seconds, threads=threads, thread=thread, numbers=here)
    if thread is not None:
        member.program = thread
    watch = PrefixStore("watch", store)
    outlook = (Warden if place == 0 else Outlook)(watch, hosts, host, member)
    member.when_aborted = outlook.tell_aborted
    bridge: Bridge | None = None
    try:
        if place < hosts.rails:
            rail = PrefixStore(f"rail/{place}", store)
            bridge = open_bridge(
                rail, host, len(hosts), max(0.1, deadline - time.monotonic()), threads=threads
            )
        local = LocalEngine(member)
        crossing = Crossing(local, hosts, rank, bridge, outlook, name)
        messages = Messages(PrefixStore("mail", store), crossing, threads=threads)
        engine = MultiHostEngine(crossing, messages)
        if isinstance(outlook, Warden):
            outlook.start()
        crossing.agree(Call(pack(Kind.barrier), 0, max(0.1, deadline - time.monotonic()), None))
    except BaseException:
        member.leave()
        if bridge is not None:
            bridge.close()
        outlook.leave()
        raise
    return engine
