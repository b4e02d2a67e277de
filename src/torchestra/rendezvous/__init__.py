"""Rendezvous: ranks find each other by a launcher's variables, an address, a file, or a store."""

from __future__ import annotations

from torchestra.rendezvous.environment import LaunchEnvironment, launch_environment
from torchestra.rendezvous.handlers import register_rendezvous_handler
from torchestra.rendezvous.methods import (
    Rendezvous,
    has_unknown_size,
    join_rendezvous,
    open_store,
    rendezvous,
)

__all__ = [
    "LaunchEnvironment",
    "Rendezvous",
    "has_unknown_size",
    "join_rendezvous",
    "launch_environment",
    "open_store",
    "register_rendezvous_handler",
    "rendezvous",
]
