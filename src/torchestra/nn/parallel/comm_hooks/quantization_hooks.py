"""Averages gradients, sent as one byte each.

Each rank maps its gradients linearly onto 0..255 and sends the bytes, with the scale and the zero point, to
all others in one all_gather; all ranks add up the same numbers in the same order, so the ranks stay
bit-identical. Rounding changes a gradient by half a scale at most, that is by the range of the numbers
quantized together, 0 included, divided by 510; the average by no more than the largest such error. Zeros stay
zeros. Where gradients are not finite, neither are the averages of their tensor, or channel.

The bytes per rank are those of an all_reduce of N bytes per element, so with more than about eight ranks
nothing is saved any more.

The affine map is the one of Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference" (CVPR 2018), section 2.1.
"""

from __future__ import annotations

import torch

from torchestra.collectives.functions import all_gather_into_tensor
from torchestra.engine.kernels.reductions import default_float_mode
from torchestra.nn.parallel.comm_hooks.default_hooks import member
from torchestra.nn.parallel.comm_hooks.interface import GradBucket
from torchestra.world.init import AnyGroup

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_LEVELS = 255


def quantization_pertensor_hook(
    process_group: AnyGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits, with one scale for the bucket."""
    return _average(process_group, bucket, bucket.buffer().numel())


def quantization_perchannel_hook(
    process_group: AnyGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits, with a scale for each ``bucket_size`` gradients.

    Costs 8 more bytes for each scale; large gradients reduce the precision only of those in their channel.
    """
    return _average(process_group, bucket, bucket_size)


def _average(
    process_group: AnyGroup | None, bucket: GradBucket, channel: int
) -> torch.futures.Future[torch.Tensor]:
    group = member(process_group)
    buffer = bucket.buffer()
    mine = quantize(buffer, max(channel, 1))
    gathered = torch.empty(group.size(), mine.numel(), dtype=torch.uint8)
    work = all_gather_into_tensor(gathered, mine, group, async_op=True)
    assert work is not None

    @default_float_mode()  # any thread may end the operation and run this
    def add_up(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what went wrong
        total = dequantize(gathered[0], buffer.numel(), max(channel, 1))
        for message in gathered[1:]:
            total += dequantize(message, buffer.numel(), max(channel, 1))
        return buffer.copy_(total.div_(group.size()))

    return work.get_future().then(add_up)


def quantize(tensor: torch.Tensor, channel: int) -> torch.Tensor:
    """Encode a tensor as scales and zero points (float32, one pair per channel), then a byte per element.

    Args:
        tensor: real numbers, in one dimension.
        channel: how many consecutive elements share a scale; the last channel may have fewer.
    """
    rows = _in_rows(tensor.detach().float(), channel)
    low, high = (
        (bound.squeeze(1) for bound in rows.aminmax(dim=1, keepdim=True))
        if rows.numel()
        else (rows.new_zeros(0), rows.new_zeros(0))
    )
    low, high = low.clamp_max(0), high.clamp_min(0)
    # Divided first, so that the difference does not overflow.
    scale = high / _LEVELS - low / _LEVELS
    scale = torch.where(scale == 0, 1.0, scale)
    zero = torch.round(-low / scale)
    levels = torch.round(rows / scale[:, None]).add_(zero[:, None]).clamp_(0, _LEVELS)
    levels = levels.nan_to_num_(0).to(torch.uint8).view(-1)[: tensor.numel()]
    return torch.cat([torch.stack([scale, zero]).view(-1).view(torch.uint8), levels])


def dequantize(message: torch.Tensor, numel: int, channel: int) -> torch.Tensor:
    """Decode the ``numel`` numbers that :func:`quantize` has encoded, as float32."""
    head = message.numel() - numel
    scale, zero = message[:head].clone().view(torch.float32).view(2, -1, 1)
    rows = _in_rows(message[head:].float(), channel)
    return rows.sub_(zero).mul_(scale).view(-1)[:numel]


def _in_rows(flat: torch.Tensor, length: int) -> torch.Tensor:
    """Reshape to rows of this length, the last one padded with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % length)).view(-1, length)
