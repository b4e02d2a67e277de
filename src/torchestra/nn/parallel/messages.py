"""Error texts of a reducer, for gradients that have not arrived as expected."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMES = 10


def unfinished(
    indices: Sequence[int], names: Sequence[str], rank: int, *, finds_unused: bool, static: bool
) -> str:
    """Say that the previous round has not ended: the gradients of these parameters have not arrived."""
    opening = "Expected to have finished reduction in the prior iteration before starting a new one"
    if not indices:
        return (
            f"{opening}: on rank {rank} backward raised an error before it ended; wrap the module again on"
            " all ranks"
        )
    if static:
        cause = (
            ". This error indicates that your training graph has changed in this iteration, e.g., one"
            " parameter is used in first iteration, but then got unused in the second iteration. this is not"
            " compatible with static_graph set to True."
        )
    elif finds_unused:
        cause = (
            ". Since `find_unused_parameters=True` is enabled, these outputs were not seen: make sure that"
            " all `forward` function outputs participate in calculating loss."
        )
    else:
        cause = (
            ". The loss of this rank did not depend on all parameters. Find out which by passing the keyword"
            " argument `find_unused_parameters=True`, or make sure that all `forward` function outputs"
            " participate in calculating loss. If backward raised an error, wrap the module again on all"
            " ranks."
        )
    more = f" and {len(indices) - _MAX_NAMES} more" if len(indices) > _MAX_NAMES else ""
    shown = ", ".join(names[index] for index in indices[:_MAX_NAMES])
    return (
        f"{opening}{cause}\nParameters which did not receive grad for rank {rank}: {shown}{more}."
        f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, indices))}"
    )


def marked_twice(name: str, index: int, rank: int) -> str:
    """Say that a parameter's gradient arrived again before all others arrived once."""
    return (
        f"Expected to mark a variable ready only once. The gradient of parameter {name!r} (index {index})"
        f" was computed twice on rank {rank} before all others were computed once. Is it shared between parts"
        " that reentrant checkpointing runs (then use use_reentrant=False, or static_graph=True if every step"
        " is like the first), is it used outside of forward, or was backward run twice through a part of the"
        " module?"
    )


def not_unused(name: str, index: int, rank: int) -> str:
    """Say that a gradient arrived for a parameter that no output depends on."""
    return (
        f"Expected to mark a variable ready only once. Parameter {name!r} (index {index}) received a gradient"
        f" on rank {rank}, though no tensor in what forward returned depends on it, so that it was taken for"
        " unused: return lists, tuples, dicts or dataclasses of tensors, and where activations are"
        " checkpointed use use_reentrant=False, or static_graph=True if every step is like the first"
    )


def graph_changed(name: str, index: int, rank: int) -> str:
    """Say that, with a static graph, a gradient arrived more often than in the first round."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first"
        " iteration, but then got used in the second iteration. this is not compatible with static_graph set"
        f" to True. On rank {rank} parameter {name!r} (index {index}) received more gradients than in the"
        " first iteration"
    )
