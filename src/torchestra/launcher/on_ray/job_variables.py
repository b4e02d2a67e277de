"""The environment variables that all ranks of a job on Ray have, and the job's store that they name."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.launcher.on_ray.placement import HeldActor, Placement
from torchestra.store.secret import SECRET_VARIABLE

_OF_A_HOST = frozenset({"TORCHESTRA_HOST_ID", "TORCHESTRA_STORE"})
_REPLICAS = 3


def job_variables(placement: Placement, env: Mapping[str, str], *, replicated: bool) -> dict[str, str]:
    """Serve the job's store, in actors, as nodes may not reach the launcher; return the ranks' variables.

    Args:
        env: variables that override those for torchestra in this process's environment.
        replicated: have three actors serve a replica of the store each, on different nodes as far as there
            are such, if there are three; the others replace a lost one.

    Raises:
        DistError: the store cannot be served.
    """
    secret = env.get(SECRET_VARIABLE) or os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    first = placement.ranks_placed[0].held
    purpose = f"serve the job's store on host {first.info.host}"
    (master_port,) = placement.call([first.actor.reserve_master_port.remote()], purpose)
    every = _spread([placed.held for placed in placement.ranks_placed] + placement.spares)
    variables = {**_settings(), **env}
    if replicated and len(every) >= _REPLICAS:
        addresses = _served_by_replicas(placement, every, heartbeat_bound(variables), secret)
    else:
        addresses = placement.call([first.actor.serve_store.remote(first.info.address, secret)], purpose)
    return {
        **variables,
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


def _served_by_replicas(
    placement: Placement, every: Sequence[HeldActor], silent_s: float, secret: str
) -> list[str]:
    """Have the first actors serve a replica each, and all look after them; return their addresses."""
    purpose = "serve the replicas of the job's store"
    told = [held.actor.reserve_replica.remote(held.info.address, silent_s, secret) for held in every]
    addresses: list[str] = placement.call(told, purpose)[:_REPLICAS]
    placement.call([held.actor.stand_by.remote(addresses, secret) for held in every], purpose)
    return addresses


def _spread(held: Sequence[HeldActor]) -> list[HeldActor]:
    """Return actors in such an order that each node comes once before any comes again; the first stays."""
    turns: dict[str, Any] = {}
    numbered = []
    for each in held:
        turns[each.info.node] = turn = turns.get(each.info.node, -1) + 1
        numbered.append((turn, each))
    return [each for _, each in sorted(numbered, key=lambda one: one[0])]
