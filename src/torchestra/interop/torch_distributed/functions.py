"""Functions of torch.distributed that require a certain backend, for groups of torchestra.

They check for Gloo's name or class, or pass a backend to C++. For groups of torchestra each calls the group's
method instead; for all other groups it is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d as c10d

from torchestra.errors import InvalidArgumentError, NotInitializedError, shown
from torchestra.interop.redirection import redirect
from torchestra.interop.torch_distributed.group import TorchestraGroup
from torchestra.interop.torch_distributed.registry import enter_group

_Function = Callable[..., Any]


def serve_functions() -> None:
    """Make these functions, as far as this torch has them, serve groups of torchestra too."""
    for name, make in _SERVED.items():
        if (function := getattr(c10d, name, None)) is not None:
            redirect(function, make)


def _ours(group: Any) -> TorchestraGroup | None:
    chosen = distributed.group.WORLD if group is None else group
    return chosen if isinstance(chosen, TorchestraGroup) else None


def _set_pg_timeout(original: _Function) -> _Function:
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        if (ours := _ours(group)) is None:
            original(timeout, group)
        else:
            c10d._check_valid_timeout(timeout)
            ours.set_timeout(timeout)

    return set_pg_timeout


def _monitored_barrier(original: _Function) -> _Function:
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        if (ours := _ours(group)) is None:
            original(group, timeout, wait_all_ranks)
        else:
            ours.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def _split_group(original: _Function) -> _Function:
    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> Any:
        parent = _ours(parent_pg)
        if parent is None:
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
        return _split(parent, split_ranks, timeout, group_desc, **more)

    return split_group


def _split(
    parent: TorchestraGroup,
    split_ranks: list[list[int]] | None,
    timeout: timedelta | None,
    description: str | None,
    backend: str | None = None,
) -> TorchestraGroup | None:
    _check_split(parent, split_ranks)
    assert split_ranks is not None
    name, config = c10d._world.pg_map[parent][0], c10d._world.pg_backend_config[parent]
    if backend is not None and str(c10d.BackendConfig(c10d.Backend(backend))) != config:
        raise InvalidArgumentError(
            f"split_group: `backend` must be the parent's, {name!r}: a group of torchestra is split as it is;"
            f" got {backend!r}"
        )
    # Every rank of the parent counts, so that members of a part agree on its name whatever their other parts.
    parent.splits += 1
    if timeout is not None:
        c10d._check_valid_timeout(timeout)
    mine = next((sorted(part) for part in split_ranks if parent.rank() in part), None)
    if mine is None:
        return None
    told = f"{parent.group_name}:split:{parent.splits}:{mine[0]}"
    part = parent.split_group(mine, timeout, None, told, description)
    assert part is not None
    enter_group(part, name, config, part.get_group_store(), part.inner.ranks, told)
    return part


def _check_split(parent: TorchestraGroup, split_ranks: list[list[int]] | None) -> None:
    if parent not in c10d._world.pg_map:
        raise NotInitializedError(f"split_group: {parent!r} has been destroyed")
    if not split_ranks:
        raise InvalidArgumentError(f"split_ranks cannot be None or empty, got {shown(split_ranks)}")
    every = [rank for part in split_ranks for rank in part]
    if not all(split_ranks) or len(set(every)) != len(every) or not set(every) <= set(range(parent.size())):
        raise InvalidArgumentError(
            f"split_group: `split_ranks` must be lists of ranks of the parent (0 to {parent.size() - 1}),"
            f" none empty and no rank twice; got {shown(split_ranks)}"
        )


def _create_shrunk_process_group(original: _Function) -> _Function:
    def create(
        new_backend: Any, remaining_ranks: Sequence[int], metadata: dict[str, Any], is_default_group: bool
    ) -> Any:
        if not isinstance(new_backend, TorchestraGroup):
            return original(new_backend, remaining_ranks, metadata, is_default_group)
        name = metadata["new_group_name"]
        # Ranks are renumbered, so the groups must not meet under the same keys as before.
        metadata["store"] = c10d.PrefixStore(f"{name}/", metadata["store"])
        new_backend.move_to(metadata["store"])
        new_backend._set_group_name(name)
        shrunk = f"{metadata['original_group_name']}:shrunk"
        new_backend._set_group_desc("default:shrunken" if is_default_group else shrunk)
        c10d._world.pg_backend_config[new_backend] = metadata["backend_config"]
        return new_backend

    return create


_SERVED: dict[str, Callable[[_Function], _Function]] = {
    "_set_pg_timeout": _set_pg_timeout,
    "monitored_barrier": _monitored_barrier,
    "split_group": _split_group,
    "_create_shrunk_process_group": _create_shrunk_process_group,
}
