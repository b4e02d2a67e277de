"""PowerSGD: each gradient matrix is sent as the product of two thin ones.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS 2019), https://arxiv.org/abs/1905.13727, algorithms 1 and 2. For a matrix M (n x m, the average of
the ranks' M_i) and Q (m x r) with orthonormal columns, one step of the power method:

1. P = average of M_i Q; one all_reduce, which also averages the gradients that are not compressed;
2. the columns of P are made orthonormal;
3. Q = average of M_i^T P; one all_reduce;
4. P Q^T, the projection of M onto r directions, replaces M. Each rank adds its error, M_i - P Q^T, to its
   next gradient (error feedback), and the next step starts from Q (warm start).

Each rank sends r (n + m) numbers instead of n m. The result is exact where M has rank r or less; its error is
never more than M itself.

Orthonormal columns come from a QR factorization, which has them for matrices of deficient rank too, even for
zero: such a step loses nothing, and the next one is not affected. (Gram-Schmidt, as in the paper, turns such
matrices into noise or NaNs.) It is computed in float32 where gradients have half precision.

The callback of the first all_reduce calls the second, on the group's own thread, before anything that was
queued later; so the order is the same on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchestra.collectives.functions import all_reduce
from torchestra.engine.kernels.reductions import default_float_mode
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.comm_hooks.default_hooks import average, member
from torchestra.nn.parallel.comm_hooks.interface import GradBucket
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup, default_group

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

_log = logging.getLogger(__name__)
_MAX_SEEDS = 1_000_000_000


class PowerSGDState:
    """The state of :func:`powerSGD_hook`: its options, and the tensors that it keeps from step to step.

    It is pickled without the group; unpickled, it has the default group.

    Args:
        process_group: the ranks; None: the default group.
        matrix_approximation_rank: r. The larger, the more exact and the slower; 1 to 4 are usual.
        start_powerSGD_iter: before this step gradients are averaged in full, because the first steps are the
            most sensitive ones. Must be more than 1 with error feedback or warm start, since buckets change
            after the first step.
        min_compression_rate: matrices are compressed only if they shrink by more than this factor.
        use_error_feedback: keep the error for the next step. Needs memory for all gradients once more.
        warm_start: start from the previous Q; if False, from a random one in every step.
        orthogonalization_epsilon: without effect. torch adds it to lengths before dividing by them; the
            factorization here has no such division.
        random_seed: of the random matrices; the same on all ranks.
        compression_stats_logging_frequency: steps from one log of the compression rate to the next.
        batch_tensors_with_same_shape: multiply matrices of the same shape together.

    Attributes:
        iter: the number of steps so far.
        error_dict, q_memory_dict, p_memory_dict: the tensors kept, by bucket.

    Raises:
        InvalidArgumentError: ``start_powerSGD_iter`` is too small.
    """

    def __init__(
        self,
        process_group: AnyGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise InvalidArgumentError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, because"
                " PowerSGD can only be applied after the first two iterations in DDP, when the buckets no"
                f" longer change; got {start_powerSGD_iter}"
            )
        if matrix_approximation_rank < 1:
            raise InvalidArgumentError(
                f"`matrix_approximation_rank` must be 1 or more, got {matrix_approximation_rank}"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.on_rebuild()
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape

    def on_rebuild(self) -> None:
        """Forget everything, and count steps from 0: the wrapper's group and buckets were replaced.

        Gradients are averaged in full again in the first ``start_powerSGD_iter`` steps; for fewer, set
        ``iter`` afterwards, to the same number on all ranks.
        """
        self.rng = np.random.RandomState(self.random_seed)
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}
        self.iter = 0

    def __getstate__(self) -> dict[str, Any]:
        _log.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return {name: value for name, value in vars(self).items() if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = default_group()
        _log.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group"
            " is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.random_seed = 0  # of a state that was saved before there was the attribute
        vars(self).update(state)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                _log.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return, since compression began: the compression rate, the numbers before it, and those sent."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket by PowerSGD, each parameter's gradient as one matrix.

    A gradient is viewed as a matrix with as many rows as its first dimension has. Gradients that would not
    shrink by more than ``state.min_compression_rate``, such as vectors, are averaged in full.
    """
    if not _begins(state, bucket):
        return _in_full(state, bucket)
    flat = bucket.buffer()
    before = _with_error(state, bucket.index(), flat)
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for gradient in bucket.gradients():
        matrix = _as_matrix(gradient)
        sent = gradient.numel()
        if matrix is not None and _shrinks(state, *matrix.shape):
            matrices.append(matrix)
            sent = sum(matrix.shape) * _rank(state, *matrix.shape)
        else:
            rest.append(gradient)
        state.total_numel_before_compression += gradient.numel()
        state.total_numel_after_compression += sent
    _report(state, bucket)
    future = _compress(state, bucket, matrices, rest)
    return future.then(lambda done: _end(state, bucket.index(), flat, before, done))


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket by PowerSGD, all its gradients together as one square matrix.

    Faster than :func:`powerSGD_hook`, and less exact: the rows and columns of that matrix have no meaning.
    """
    if not _begins(state, bucket):
        return _in_full(state, bucket)
    flat = bucket.buffer()
    before = _with_error(state, bucket.index(), flat)
    side = math.isqrt(max(flat.numel() - 1, 0)) + 1
    square = torch.nn.functional.pad(flat, (0, side * side - flat.numel()))
    state.total_numel_before_compression += flat.numel()
    state.total_numel_after_compression += 2 * side * _rank(state, side, side)
    _report(state, bucket)

    def cut(done: torch.futures.Future[None]) -> torch.Tensor:
        flat.copy_(square[: flat.numel()])
        return _end(state, bucket.index(), flat, before, done)

    return _compress(state, bucket, [square.view(side, side)], []).then(cut)


def _begins(state: PowerSGDState, bucket: GradBucket) -> bool:
    """Return whether to compress this bucket; count the step if it is the last one."""
    begins = state.iter >= state.start_powerSGD_iter and bucket.buffer().is_floating_point()
    state.maybe_increase_iter(bucket)
    return begins


def _in_full(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return average(member(state.process_group), bucket.buffer())


def _rank(state: PowerSGDState, rows: int, columns: int) -> int:
    return min(rows, columns, state.matrix_approximation_rank)


def _as_matrix(gradient: torch.Tensor) -> torch.Tensor | None:
    """View a gradient as a matrix with as many rows as its first dimension has; None for a scalar."""
    if not gradient.numel() or not gradient.dim():
        return None
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    # Strides may be in another order than dimensions, as in channels-last layout, but leave no gaps.
    return gradient.as_strided((rows, columns), (columns, 1))


def _shrinks(state: PowerSGDState, rows: int, columns: int) -> bool:
    sent = (rows + columns) * _rank(state, rows, columns)
    return sent * state.min_compression_rate < rows * columns


def _with_error(state: PowerSGDState, key: int, flat: torch.Tensor) -> torch.Tensor | None:
    """Add the previous step's error; return a copy of the sum, to compute this step's error later."""
    if not state.use_error_feedback:
        return None
    error = _remembered(state.error_dict, key, flat.numel())
    if error is not None:
        flat.add_(error)
    return flat.clone()


def _remembered(memory: dict[int, torch.Tensor], key: int, numel: int) -> torch.Tensor | None:
    """Return the remembered tensor of a bucket, which must not have changed."""
    found = memory.get(key)
    if found is not None and found.numel() != numel:
        raise InvalidArgumentError(
            f"PowerSGD: bucket {key} is not what it was when it was compressed before ({found.numel()}"
            f" numbers are remembered, {numel} are needed); give each model a PowerSGDState of its own"
        )
    return found


def _end(
    state: PowerSGDState,
    key: int,
    flat: torch.Tensor,
    before: torch.Tensor | None,
    done: torch.futures.Future[None],
) -> torch.Tensor:
    """Remember the error; return the averaged bucket."""
    done.value()  # raises what went wrong
    if before is not None:
        state.error_dict[key] = before.sub_(flat)
    return flat


def _report(state: PowerSGDState, bucket: GradBucket) -> None:
    if bucket.is_last() and state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        _log.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            state.iter,
            before,
            after,
            rate,
        )
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency


def _compress(
    state: PowerSGDState, bucket: GradBucket, matrices: Sequence[torch.Tensor], rest: Sequence[torch.Tensor]
) -> torch.futures.Future[None]:
    """Average the matrices by one step of the power method, and the rest in full, all in place."""
    group = member(state.process_group)
    batches = _batches(matrices, state.batch_tensors_with_same_shape)
    stacks = [batch[0].unsqueeze(0) if len(batch) == 1 else torch.stack(batch) for batch in batches]
    ranks = [_rank(state, *stack.shape[1:]) for stack in stacks]
    p_shapes = [(len(stack), stack.shape[1], rank) for stack, rank in zip(stacks, ranks, strict=True)]
    q_shapes = [(len(stack), stack.shape[2], rank) for stack, rank in zip(stacks, ranks, strict=True)]
    p_numel, q_numel = (sum(map(math.prod, shapes)) for shapes in (p_shapes, q_shapes))
    rest_numel = sum(gradient.numel() for gradient in rest)

    q_flat = _remembered(state.q_memory_dict, bucket.index(), q_numel)
    if q_flat is None:
        q_flat = _random(state, q_numel, bucket.buffer())
    p_flat = _remembered(state.p_memory_dict, bucket.index(), p_numel + rest_numel)
    if p_flat is None:
        p_flat = bucket.buffer().new_empty(p_numel + rest_numel)
    if state.warm_start:
        state.q_memory_dict[bucket.index()] = q_flat
        state.p_memory_dict[bucket.index()] = p_flat
    ps, qs = _views(p_flat, p_shapes), _views(q_flat, q_shapes)
    for stack, p, q in zip(stacks, ps, qs, strict=True):
        orthogonalize(q)
        torch.bmm(stack, q, out=p)
    if rest:
        torch.cat([gradient.reshape(-1) for gradient in rest], out=p_flat[p_numel:])

    def finish(averaged: torch.futures.Future[torch.Tensor]) -> None:
        averaged.value()  # raises what went wrong
        for gradient, part in zip(rest, _views(p_flat[p_numel:], [each.shape for each in rest]), strict=True):
            gradient.copy_(part)
        # All ranks must compute the same, each on the thread that happened to end the operation.
        with default_float_mode():
            for stack, p, q in zip(stacks, ps, qs, strict=True):
                orthogonalize(p)
                torch.bmm(stack.transpose(1, 2), p, out=q)
        if stacks:
            all_reduce(q_flat, ReduceOp.AVG, group)
        with default_float_mode():
            for stack, batch, p, q in zip(stacks, batches, ps, qs, strict=True):
                torch.bmm(p, q.transpose(1, 2), out=stack)
                if len(batch) > 1:
                    for matrix, approximation in zip(batch, stack, strict=True):
                        matrix.copy_(approximation)

    return average(group, p_flat).then(finish)


def _batches(matrices: Sequence[torch.Tensor], together: bool) -> list[list[torch.Tensor]]:
    """Batch the matrices that are multiplied together: each alone, or those of the same shape."""
    if not together:
        return [[matrix] for matrix in matrices]
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    return list(by_shape.values())


def _views(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """View consecutive parts of the tensor with these shapes."""
    views, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].view(shape))
        start = end
    return views


def _random(state: PowerSGDState, numel: int, like: torch.Tensor) -> torch.Tensor:
    """Draw normal numbers, the same on all ranks, from a separate generator."""
    generator = torch.Generator().manual_seed(int(state.rng.randint(_MAX_SEEDS)))
    return torch.randn(numel, generator=generator).to(like.dtype)


def orthogonalize(matrices: torch.Tensor) -> None:
    """Replace each of a batch of matrices by orthonormal columns that span its own, in place.

    Args:
        matrices: batch x rows x columns, with at most as many columns as rows.
    """
    precise = matrices if matrices.dtype == torch.float64 else matrices.float()
    matrices.copy_(torch.linalg.qr(precise).Q)
