"""Random numbers that depend on the seed, the step and the shard alone, and not on who computes it."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

EPOCH_ORDER = -1
"""In a shard's place: the order of samples in an epoch."""


def key_of(seed: int, step: int, shard: int) -> int:
    """Return a number of 63 bits that differs for every seed, step and shard."""
    digest = hashlib.blake2b(struct.pack(">qqq", seed, step, shard), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int, step: int, shard: int) -> int:
    """Seed the generators of torch (all devices), NumPy and Python; return the key that was used."""
    key = key_of(seed, step, shard)
    torch.manual_seed(key)
    np.random.seed(key & 0xFFFF_FFFF)
    random.seed(key)
    return key


def epoch_order(seed: int, epoch: int, samples: int) -> torch.Tensor:
    """Return the numbers of an epoch's samples in random order."""
    generator = torch.Generator().manual_seed(key_of(seed, epoch, EPOCH_ORDER))
    return torch.randperm(samples, generator=generator)
