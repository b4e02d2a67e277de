"""Meeting the ranks of a group of torch.distributed, which may be threads or processes."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d as torch_c10d
from torch.distributed import distributed_c10d as c10d

from torchestra.arguments.options import GroupOptions
from torchestra.errors import DistError
from torchestra.interop.torch_distributed.errors import as_torch_error
from torchestra.interop.torch_distributed.torch_store import AdoptedStore
from torchestra.process_group import ProcessGroup
from torchestra.process_group.reconfigurable import reconfigurable_group
from torchestra.store import Store
from torchestra.store.secret import job_secret
from torchestra.store.torch_agent import TorchStore
from torchestra.types import timeout_seconds


def joined_store(store: Any) -> Store:
    """Return torch's store as one of ours; if it holds one of ours, that one, under the same prefixes.

    On torch's own stores ranks prove that they know the job's secret. Of these only a HashStore is within
    one host for certain: torch's files may be shared between hosts, whose ranks find out where they are.
    """
    inner = store
    while isinstance(inner, torch_c10d.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, AdoptedStore):
        return inner.part_within(store)
    return TorchStore(store, proves=job_secret(None), within_host=isinstance(inner, torch_c10d.HashStore))


def rendezvous(options: Any) -> ProcessGroup:
    """Meet the other ranks.

    Raises:
        DistBackendError: not all came in time, or they cannot share memory; an error of both libraries.
    """
    rank, size = options.group_rank, options.group_size
    store = joined_store(options.store)
    try:
        # A group may be made again over a store that outlives the first, under the same name.
        again = store.add(f"torchestra/made/{rank}", 1)
        return ProcessGroup(
            store,
            rank,
            size,
            GroupOptions(options.timeout, backend="threads" if ranks_are_threads() else "native"),
            name=f"torch-{options.group_id}-{again}",
            ranks=list(options.global_ranks_in_group) or None,
        )
    except DistError as error:
        raise as_torch_error(error) from error.__cause__


def without_peers(options: Any) -> ProcessGroup:
    """Return a group that has no peers until it is reconfigured; meet nobody.

    Raises:
        DistBackendError: this rank's store cannot be served; an error of both libraries.
    """
    backend = "threads" if ranks_are_threads() else "native"
    seconds = timeout_seconds(options.timeout)
    try:
        return reconfigurable_group(
            options.group_rank,
            options.group_size,
            f"torch-{options.group_id}",
            GroupOptions(seconds, backend=backend),
            backend=backend,
            timeout_s=seconds,
            store=joined_store(options.store),
            ranks=list(options.global_ranks_in_group) or None,
        )
    except DistError as error:
        raise as_torch_error(error) from error.__cause__


def ranks_are_threads() -> bool:
    """Return whether each thread has a torch.distributed of its own, as in torch's tests with threads."""
    return not isinstance(c10d._world, c10d._World)
