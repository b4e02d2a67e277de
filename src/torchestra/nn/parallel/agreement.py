"""Checks that all ranks wrap the same module in the same way; if not, raises an error on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

import torch

from torchestra.collectives.functions import all_gather, all_gather_into_tensor
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup

Description = list[tuple[str, str]]


def describe(
    module: torch.nn.Module, options: Mapping[str, object], ignored: Collection[str] = ()
) -> Description:
    """List everything that must be the same on all ranks, as pairs of name and this rank's description."""
    lines = [(f"argument `{name}`", repr(value)) for name, value in options.items()]
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        kept = [(name, tensor) for name, tensor in named if name not in ignored]
        for index, (name, tensor) in enumerate(kept):
            words = f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
            if kind == "parameter":
                if not tensor.requires_grad:
                    words += " without gradient"
                elif not tensor.is_contiguous():
                    words += f" with strides {list(tensor.stride())}"
            lines.append((f"{kind} {index}", f"{name!r}: {words}"))
    return lines


def check_agreement(mine: Description, group: ProcessGroup) -> None:
    """Compare the descriptions of all ranks. Must be called by all of them.

    Raises:
        InvalidArgumentError: on every rank: they differ. The message names the first difference.
    """
    text = json.dumps(mine).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = torch.empty(group.size(), digest.numel(), dtype=torch.uint8)
    all_gather_into_tensor(digests, digest, group)
    if bool((digests == digests[0]).all()):
        return
    lengths = torch.empty(group.size(), dtype=torch.int64)
    all_gather_into_tensor(lengths, torch.tensor([len(text)]), group)
    texts = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    all_gather(texts, torch.frombuffer(bytearray(text), dtype=torch.uint8), group)
    descriptions = [[(what, how) for what, how in json.loads(bytes(each.numpy()))] for each in texts]
    raise InvalidArgumentError(
        f"DDP expects same model across all ranks, but {_counts(descriptions)}{_difference(descriptions)};"
        " wrap the same module on every rank"
    )


def _counts(descriptions: Sequence[Description]) -> str:
    """Name the ranks that do not have as many parameters as rank 0."""
    numbers = [sum(what.startswith("parameter ") for what, _ in each) for each in descriptions]
    return "".join(
        f"Rank {rank} has {number} params, while rank 0 has inconsistent {numbers[0]} params: "
        for rank, number in enumerate(numbers)
        if number != numbers[0]
    )


def _difference(descriptions: Sequence[Description]) -> str:
    """Describe the first difference between a rank and rank 0."""
    reference = dict(descriptions[0])
    for rank, description in enumerate(descriptions):
        other = dict(description)
        for what in [*reference, *(what for what in other if what not in reference)]:
            if reference.get(what) != other.get(what):
                return (
                    f"{what} is {reference.get(what, 'missing')} on rank 0, but {other.get(what, 'missing')}"
                    f" on rank {rank}"
                )
    raise AssertionError("the digests of the models differ, but the models do not")
