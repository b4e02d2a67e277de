"""Choose the bridge that a group uses between its hosts.

Every rank must prove the job's secret before it exchanges data with other hosts. ``curve`` makes sure of
that. Gloo and MPI authenticate nobody, so they are used only where the user says that the network can be
trusted: any process that reaches a port of the job, on one of its hosts too, can then take the place of a
rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from torchestra.engine.multihost.bridge import Bridge
from torchestra.engine.multihost.curve_bridge import CurveBridge
from torchestra.engine.multihost.gloo_bridge import GlooBridge
from torchestra.engine.multihost.group_transport import GroupTransport
from torchestra.engine.multihost.mpi import why_no_mpi
from torchestra.engine.multihost.mpi_bridge import MPIBridge
from torchestra.engine.multihost.thread_bridge import ThreadBridge
from torchestra.errors import InvalidArgumentError
from torchestra.store import Store
from torchestra.store.secret import SECRET_ADVICE

BRIDGE_VARIABLE = "TORCHESTRA_BRIDGE"
"""Names the bridge: ``curve``, ``gloo`` or ``mpi``; the same for all ranks."""

TRUST_VARIABLE = "TORCHESTRA_TRUST_NETWORK"
"""``1`` says that nobody but the job reaches its ports; the same for all ranks."""

_log = logging.getLogger(__name__)
_warned = False


def choose_bridge(*, threads: bool, mpiexec: bool, has_secret: bool) -> str:
    """Return the kind of bridge: that in TORCHESTRA_BRIDGE, or else the default.

    The default is ``curve``; in a trusted network, MPI where mpiexec has started the ranks, or else Gloo.

    Args:
        threads: the ranks are threads of one process.
        mpiexec: mpiexec started them.
        has_secret: the job has a secret.

    Raises:
        InvalidArgumentError: there is no such bridge, or not for these ranks; or it authenticates nobody, and
            the network is not trusted.
        ImportError: MPI is asked for, and cannot be used here.
    """
    name, trusted = os.environ.get(BRIDGE_VARIABLE, "").lower(), _trusts_network()
    if name not in ("", "curve", "gloo", "mpi"):
        raise InvalidArgumentError(f"{BRIDGE_VARIABLE} must be curve, gloo or mpi, got {name!r}")
    if name == "mpi" and threads:
        raise InvalidArgumentError(f"{BRIDGE_VARIABLE}=mpi is for ranks that are processes, not threads")
    if name in ("gloo", "mpi") and not trusted:
        raise InvalidArgumentError(
            f"{BRIDGE_VARIABLE} is {name!r}, which does not authenticate its peers: whoever reaches a port"
            f" of the job could take the place of a rank. Set {TRUST_VARIABLE}=1 on all ranks if nobody else"
            f" can reach them, or unset {BRIDGE_VARIABLE}"
        )
    if name == "mpi" and (why := why_no_mpi()):
        raise ImportError(why)
    if not name and threads:
        return "threads"
    bridge = name or ("curve" if not trusted else "mpi" if mpiexec and not why_no_mpi() else "gloo")
    if bridge == "curve" and not has_secret:
        raise InvalidArgumentError(
            "the ranks are on several hosts and have no secret to authenticate each other with:"
            f" {SECRET_ADVICE}; or, if nobody else reaches their ports, {TRUST_VARIABLE}=1"
        )
    if bridge != "curve":
        _warn_once(bridge)
    return bridge


def _trusts_network() -> bool:
    text = os.environ.get(TRUST_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise InvalidArgumentError(f"{TRUST_VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


def _warn_once(bridge: str) -> None:
    """Log, once in each process, that the network is trusted."""
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "%s is set: data between hosts goes over %s, unencrypted, and whoever reaches its ports can take"
            " part",
            TRUST_VARIABLE,
            {"gloo": "Gloo", "mpi": "MPI"}[bridge],
        )


def open_bridge(
    bridge: str,
    store: Store,
    transport: GroupTransport,
    ranks: Sequence[int],
    names: Sequence[str],
    timeout_s: float,
) -> Bridge:
    """Return one end of a rail.

    Args:
        bridge: as :func:`choose_bridge` gives it.
        store: one that only the ends of the rail, and only for this purpose, use.
        transport: of the rank that is this end.
        ranks: the ends, by host.
        names: the names of the ends, for messages.
        timeout_s: how long to look for the others.
    """
    if bridge == "curve":
        return CurveBridge(store, transport, ranks, names, timeout_s)
    host, size = ranks.index(transport.rank), len(ranks)
    if bridge == "threads":
        return ThreadBridge(store, host, size)
    return (MPIBridge if bridge == "mpi" else GlooBridge)(store, host, size, timeout_s)
