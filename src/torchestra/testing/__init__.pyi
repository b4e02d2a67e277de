"""What the testing kit offers, and where each name is defined: the one list of them."""

from . import faults
from .cases import TestCase
from .fixtures import fixture
from .outcomes import RankFailure
from .processes import MultiProcessTestCase
from .shuffling import shuffle
from .skips import (
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
from .threads import MultiThreadedTestCase, spawn_threads_and_init_comms

__all__ = [
    "TEST_SKIPS",
    "MultiProcessTestCase",
    "MultiThreadedTestCase",
    "RankFailure",
    "TestCase",
    "TestSkip",
    "faults",
    "fixture",
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
