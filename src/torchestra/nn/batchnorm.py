"""BatchNorm over the batches of all ranks.

Every rank sends the mean, the variance and the size of its batch, per channel, to all others in one
all_gather; all merge them in the same order into the mean and the variance of the whole, by the pairwise
formula of Chan, Golub and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979), which does not cancel where variances are small beside means. A rank whose batch is empty
takes part with size 0.

With N samples per channel over all ranks, x' = (x - mean) / std and y = w x' + b, the gradient is

    dL/dx = w / std (dy - 1/N sum(dy) - x' 1/N sum(dy x')),

with both sums over all ranks, which one all_reduce computes. The gradients of w and b are this rank's part;
DistributedDataParallel averages them with those of all other parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torchestra.collectives.functions import all_gather_into_tensor, all_reduce
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, default_group, is_initialized


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """BatchNorm whose statistics in training are those of all ranks' batches together.

    Arguments, parameters, buffers and state are those of :class:`torch.nn.SyncBatchNorm`, its base class. All
    ranks must run forward and backward the same number of times; batches may have different sizes, and may be
    empty on some ranks. In evaluation, in a group of one rank and without a group it is an ordinary
    BatchNorm. Half precision inputs are normalized in float32.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of :class:`torch.nn.BatchNorm2d`.
        process_group: the ranks; None: the default group at the time of the forward pass.

    Raises:
        InvalidArgumentError: from forward, on all ranks: their batches together have only one value per
            channel. From forward, without communication: the input has fewer than two dimensions, no channel,
            or another number of channels than ``num_features``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalize; in training, by the statistics of all ranks' inputs."""
        self._check(input)
        group = self._group() if self.training else None
        if group is None:
            # Not the base class's own, which would ask torch.distributed.
            return torch.nn.modules.batchnorm._BatchNorm.forward(self, input)
        mean, variance, count = _statistics(input, group)
        if count:
            self._update_running(mean, variance, count)
        return _Normalize.apply(  # type: ignore[no-any-return, no-untyped-call]
            input, self.weight, self.bias, mean, (variance + self.eps).rsqrt_(), count, group
        )

    def _check(self, batch: torch.Tensor) -> None:
        if batch.dim() < 2:
            raise InvalidArgumentError(f"expected at least 2D input (got {batch.dim()}D input)")
        if batch.shape[1] == 0:
            raise InvalidArgumentError("SyncBatchNorm number of input channels should be non-zero")
        if batch.shape[1] != self.num_features:
            raise InvalidArgumentError(
                f"SyncBatchNorm: expected {self.num_features} channels, got input of shape"
                f" {list(batch.shape)}"
            )

    def _group(self) -> ProcessGroup | None:
        """Return the group to normalize with, if it has other ranks."""
        group: AnyGroup | None = self.process_group
        if group is None and is_initialized():
            group = default_group()
        return group if isinstance(group, ProcessGroup) and group.size() > 1 else None

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            running.lerp_(new.to(running.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: AnyGroup | None = None
    ) -> torch.nn.Module:
        """Replace all BatchNorm modules of a module by this one, with the same parameters and buffers.

        Args:
            module: the module, which is changed in place; wrap it in DistributedDataParallel afterwards.
            process_group: the group of all of them.

        Returns:
            The module; if it is a BatchNorm itself, its replacement.

        Raises:
            InvalidArgumentError: a BatchNorm is lazy and has not seen an input yet.
        """
        return _converted(module, process_group, {})


def _converted(
    module: torch.nn.Module, group: AnyGroup | None, known: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    """Replace a module's BatchNorms; one that occurs twice gets the same replacement in both places."""
    if module in known:
        return known[module]
    known[module] = module
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            raise InvalidArgumentError(
                f"convert_sync_batchnorm: {module} is not initialized yet; run a forward pass first"
            )
        known[module] = _replacement(module, group)
    for name, child in module.named_children():
        converted = _converted(child, group, known)
        if converted is not child:
            known[module].add_module(name, converted)
    return known[module]


def _replacement(module: torch.nn.modules.batchnorm._BatchNorm, group: AnyGroup | None) -> SyncBatchNorm:
    made = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, group
    )
    made.weight, made.bias = module.weight, module.bias
    made.running_mean, made.running_var = module.running_mean, module.running_var
    made.num_batches_tracked = module.num_batches_tracked
    made.training = module.training
    if hasattr(module, "qconfig"):
        made.qconfig = module.qconfig
    return made


def _over(batch: torch.Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [0, *range(2, batch.dim())]


def _broadcastable(per_channel: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, *(1 for _ in batch.shape[2:]))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _statistics(batch: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and variance of each channel over all ranks' batches, and the number of values."""
    channels = batch.shape[1]
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=batch.device)
    if batch.numel():
        variance, mean = torch.var_mean(batch.to(_precise(batch.dtype)), _over(batch), correction=0)
        mine[:channels], mine[channels:-1] = mean, variance
        mine[-1] = batch.numel() // channels
    gathered = mine.new_empty(group.size(), mine.numel())
    all_gather_into_tensor(gathered, mine, group)
    counts = gathered[:, -1:]
    count = int(counts.sum())
    if count == 1:
        raise InvalidArgumentError(
            "Expected more than 1 value per channel when training, got one in the batches of all"
            f" {group.size()} ranks together"
        )
    # If all batches are empty, nothing will be normalized, so any numbers will do.
    shares = counts / max(count, 1)
    means, variances = gathered[:, :channels], gathered[:, channels:-1]
    mean = (shares * means).sum(dim=0)
    variance = (shares * (variances + (means - mean).square())).sum(dim=0)
    return mean.to(_precise(batch.dtype)), variance.to(_precise(batch.dtype)), count


class _Normalize(torch.autograd.Function):
    """Normalizes by given statistics, which depend on the inputs of all ranks by the formula above."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        reciprocal: torch.Tensor,
        count: int,
        group: ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(batch, weight, mean, reciprocal)
        ctx.count, ctx.group = count, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale = reciprocal if weight is None else reciprocal * weight
        centred = batch - _broadcastable(mean, batch)
        if bias is None:
            normal = centred.mul_(_broadcastable(scale, batch))
        else:
            normal = torch.addcmul(_broadcastable(bias, batch), centred, _broadcastable(scale, batch))
        return normal.to(batch.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, weight, mean, reciprocal = ctx.saved_tensors
        gradient = gradient.to(mean.dtype)
        centred = batch - _broadcastable(mean, batch)
        sums = torch.stack([gradient.sum(_over(batch)), (gradient * centred).sum(_over(batch))])
        wanted = ctx.needs_input_grad
        of_weight = (sums[1] * reciprocal).to(weight.dtype) if wanted[1] else None
        of_bias = sums[0].to(ctx.bias_dtype, copy=True) if wanted[2] else None
        of_batch = None
        if wanted[0]:
            all_reduce(sums, group=ctx.group)
            sums /= max(ctx.count, 1)
            scale = reciprocal if weight is None else reciprocal * weight
            slope = _broadcastable(sums[1] * reciprocal.square(), batch)
            of_batch = gradient - _broadcastable(sums[0], batch)
            of_batch = of_batch.addcmul_(centred, slope, value=-1).mul_(_broadcastable(scale, batch))
            of_batch = of_batch.to(batch.dtype)
        return of_batch, of_weight, of_bias, None, None, None, None
