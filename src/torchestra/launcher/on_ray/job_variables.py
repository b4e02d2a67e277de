"""The environment variables that all ranks of a job on Ray have, and the job's store that they name."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torchestra.launcher.on_ray.placement import HeldActor, Placement
from torchestra.store.secret import SECRET_VARIABLE

_OF_A_HOST = frozenset({"TORCHESTRA_HOST_ID", "TORCHESTRA_STORE"})
_REPLICAS = 3


def job_variables(placement: Placement, env: Mapping[str, str], *, replicated: bool) -> dict[str, str]:
    """Serve the job's store, in actors, as nodes may not reach the launcher; return the ranks' variables.

    Args:
        env: variables that override those for torchestra in this process's environment.
        replicated: have three actors serve a replica of the store each, on different nodes as far as there
            are such, if there are three.

    Raises:
        DistError: the store cannot be served.
    """
    secret = env.get(SECRET_VARIABLE) or os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    first = placement.ranks_placed[0].held
    purpose = f"serve the job's store on host {first.info.host}"
    ((port, master_port),) = placement.call([first.actor.reserve_ports.remote(first.info.address)], purpose)
    addresses = [_named(first.info.address, port)]
    servers = _spread([placed.held for placed in placement.ranks_placed] + placement.spares)[:_REPLICAS]
    if replicated and len(servers) == _REPLICAS:
        others = servers[1:]
        listening = [held.actor.reserve_ports.remote(held.info.address) for held in others]
        ports = [port for port, _ in placement.call(listening, "serve the job's store")]
        addresses += [_named(held.info.address, port) for held, port in zip(others, ports, strict=True)]
    else:
        servers = [first]
    serving = [held.actor.serve_store.remote(index, addresses, secret) for index, held in enumerate(servers)]
    placement.call(serving, purpose)
    return {
        **_settings(),
        **env,
        "WORLD_SIZE": str(len(placement.ranks_placed)),
        "MASTER_ADDR": first.info.address,
        "MASTER_PORT": str(master_port),
        "TORCHESTRA_SECRET": secret,
        "TORCHESTRA_STORE": ",".join(addresses),
        "RAY_ADDRESS": first.info.cluster,
    }


def _settings() -> dict[str, str]:
    """Return the environment's variables for torchestra, except those that concern this host."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TORCHESTRA_") and name not in _OF_A_HOST
    }


def _named(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _spread(held: Sequence[HeldActor]) -> list[HeldActor]:
    """Return actors in such an order that each node comes once before any comes again; the first stays."""
    turns: dict[str, Any] = {}
    numbered = []
    for each in held:
        turns[each.info.node] = turn = turns.get(each.info.node, -1) + 1
        numbered.append((turn, each))
    return [each for _, each in sorted(numbered, key=lambda one: one[0])]
