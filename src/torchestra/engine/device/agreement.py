"""Ranks agree on the device of each, and on whether operations on them are delegated.

They are delegated if every rank names a device of its own. Each rank that has one to name puts it into the
group's store before it meets the others, and afterwards reads what all have put there: two requests for each
rank, none for a rank without CUDA, and the same answer on all.

A rank names its device if the program has chosen one: by ``device_id``, or by having used CUDA before the
group was made (``torch.cuda.set_device``), or if NCCL is asked for. Looking for one otherwise would start
CUDA in programs that never use it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchestra.engine.device.nccl import why_no_nccl
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.store import Store

ENGINE_VARIABLE = "TORCHESTRA_DEVICE_ENGINE"
"""``staging``: have operations on CUDA tensors go through the host, though NCCL could do them."""

_KEY = "devices"


class DeviceRequest(NamedTuple):
    """What the program has asked for, concerning a group's devices.

    Attributes:
        device: this rank's; None for the current one.
        required: NCCL is asked for, by name.
    """

    device: torch.device | None = None
    required: bool = False


class Agreement(NamedTuple):
    """The agreement that operations on tensors of a device are delegated.

    Attributes:
        device: this rank's.
        identities: of the ranks' devices, by rank; all differ.
        required: NCCL was asked for.
    """

    device: torch.device
    identities: Sequence[str]
    required: bool = False

    def among(self, ranks: Sequence[int]) -> Agreement:
        """Return the agreement of a subgroup."""
        return self._replace(identities=[self.identities[rank] for rank in ranks])


class DeviceRecord(NamedTuple):
    """A rank's device and its identity, or the reason why it has none."""

    device: torch.device | None
    identity: str
    reason: str


def announce(store: Store, rank: int, request: DeviceRequest, local_rank: int | None) -> DeviceRecord | None:
    """Tell which device this rank has, if it has one to name. Must be called before the ranks meet.

    Args:
        store: one that only the ranks of the group use.
        local_rank: which device to name where the program has not chosen one; None for the first.

    Raises:
        InvalidArgumentError: TORCHESTRA_DEVICE_ENGINE has no meaning.
    """
    chosen = os.environ.get(ENGINE_VARIABLE, "")
    if chosen not in ("", "staging"):
        raise InvalidArgumentError(f"{ENGINE_VARIABLE} must be staging, or not set; got {chosen!r}")
    reason = f"{ENGINE_VARIABLE}=staging is set" if chosen else why_no_nccl()
    if not reason and not (request.required or request.device is not None or torch.cuda.is_initialized()):
        return None
    if reason and not request.required:
        return None
    record = DeviceRecord(None, "", reason) if reason else _record_of(request.device, local_rank)
    store.append(_KEY, json.dumps([rank, record.identity, record.reason]) + "\n")
    return record


def _record_of(device: torch.device | None, local_rank: int | None) -> DeviceRecord:
    index = None if device is None else device.index
    if index is None and not torch.cuda.is_initialized() and local_rank is not None:
        index = local_rank % torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    identity = str(torch.cuda.get_device_properties(index).uuid)
    return DeviceRecord(torch.device("cuda", index), identity, "")


def agree(
    store: Store, size: int, name: str, record: DeviceRecord | None, request: DeviceRequest
) -> Agreement | None:
    """Return the agreement; None if the group does not delegate. Must be called after the ranks have met.

    Raises:
        DistBackendError: NCCL is asked for and cannot be had; on all ranks that have asked.
    """
    if record is None:
        return None
    told = [json.loads(line) for line in store.get(_KEY).decode().splitlines()]
    identities = {rank: identity for rank, identity, _ in told if identity}
    if record.device is not None and len(set(identities.values())) == size:
        return Agreement(record.device, [identities[rank] for rank in range(size)], request.required)
    if not request.required:
        return None
    raise DistBackendError(
        f'group {name!r}: backend "nccl" was asked for but cannot be used: {_reasons(told, identities, size)}'
    )


def _reasons(told: list[tuple[int, str, str]], identities: dict[int, str], size: int) -> str:
    reasons = [f"rank {rank}: {reason}" for rank, _, reason in sorted(told) if reason]
    silent = sorted(set(range(size)) - {rank for rank, _, _ in told})
    if silent:
        reasons.append(f"ranks {silent} have not asked for it, and named no device")
    by_device: dict[str, list[int]] = {}
    for rank, identity in sorted(identities.items()):
        by_device.setdefault(identity, []).append(rank)
    for identity, ranks in by_device.items():
        if len(ranks) > 1:
            reasons.append(
                f"ranks {ranks} share device {identity}: give each its own, by"
                " torch.cuda.set_device(local_rank) before the group is made, or device_id="
            )
    return "; ".join(reasons)
