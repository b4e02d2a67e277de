"""What tests of distributed code need: ranks as threads or processes, skips, faults, and a pytest plugin.

``@pytest.mark.ranks(4)`` runs a plain test function on four ranks (the plugin; installing torchestra is
enough). For unittest there are :class:`MultiThreadedTestCase`, :class:`MultiProcessTestCase` and
:func:`spawn_threads_and_init_comms`, which mean what their namesakes among PyTorch's own test helpers do.
:mod:`~torchestra.testing.faults` kills, delays and loses ranks at chosen moments, and :func:`shuffle` runs
thread ranks in an order that a seed decides.
"""

from __future__ import annotations

from torchestra.store.fake import FakeStore
from torchestra.testing import faults
from torchestra.testing.comparing import TestCase
from torchestra.testing.outcomes import RankFailure
from torchestra.testing.processes import MultiProcessTestCase
from torchestra.testing.shuffling import shuffle
from torchestra.testing.skips import (
    TEST_SKIPS,
    TestSkip,
    requires_gloo,
    requires_mpi,
    requires_nccl,
    requires_ucc,
    requires_world_size,
    skip_if_lt_x_gpu,
    skip_if_no_gpu,
    skip_if_odd_worldsize,
    skip_if_small_worldsize,
)
from torchestra.testing.threads import MultiThreadedTestCase, spawn_threads_and_init_comms

__all__ = [
    "TEST_SKIPS",
    "FakeStore",
    "MultiProcessTestCase",
    "MultiThreadedTestCase",
    "RankFailure",
    "TestCase",
    "TestSkip",
    "faults",
    "requires_gloo",
    "requires_mpi",
    "requires_nccl",
    "requires_ucc",
    "requires_world_size",
    "shuffle",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_odd_worldsize",
    "skip_if_small_worldsize",
    "spawn_threads_and_init_comms",
]
