"""The test cases of remote calls: ranks that are workers, and waits for delayed messages.

From ``torch.testing._internal.dist_utils`` and ``.distributed.rpc``'s fixtures.
"""

from __future__ import annotations

import functools
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torchestra import is_initialized
from torchestra.compat import rpc
from torchestra.compat.groups import init_process_group
from torchestra.compat.rpc import _rref_context_get_debug_info

__all__ = [
    "INIT_METHOD_TEMPLATE",
    "RpcAgentTestFixture",
    "TensorPipeRpcAgentTestFixture",
    "dist_init",
    "get_function_event",
    "get_num_owners_and_forks",
    "initialize_pg",
    "noop",
    "tp_transports",
    "wait_until_node_failure",
    "wait_until_owners_and_forks_on_rank",
    "wait_until_pending_futures_and_users_flushed",
    "worker_name",
]

F = TypeVar("F", bound=Callable[..., Any])

INIT_METHOD_TEMPLATE = "file://{file_name}"
_POLL_SECONDS = 0.02


def tp_transports() -> Sequence[str] | None:
    """Return None: there are no transports of TensorPipe to choose from."""
    return None


def worker_name(rank: int) -> str:
    """Return the name of a rank as a worker."""
    return f"worker{rank}"


def noop() -> None:
    """Do nothing, when called on another worker."""


def dist_init(
    old_test_method: F | None = None,
    setup_rpc: bool = True,
    clean_shutdown: bool = True,
    faulty_messages: Any = None,
    messages_to_delay: Any = None,
) -> Any:
    """Decorate a test: each rank is a worker before it, and shuts down after it.

    A leak of references is an error. ``faulty_messages`` and ``messages_to_delay`` go to the test case's
    ``setup_fault_injection``.
    """
    if old_test_method is None:
        return functools.partial(
            dist_init,
            setup_rpc=setup_rpc,
            clean_shutdown=clean_shutdown,
            faulty_messages=faulty_messages,
            messages_to_delay=messages_to_delay,
        )

    @functools.wraps(old_test_method)
    def test(self: Any, *args: Any, **kwargs: Any) -> Any:
        rpc.api._ignore_rref_leak = False
        self.worker_id = self.rank
        self.setup_fault_injection(faulty_messages, messages_to_delay)
        if setup_rpc:
            rpc.init_rpc(
                worker_name(self.rank),
                backend=self.rpc_backend,
                rank=self.rank,
                world_size=self.world_size,
                rpc_backend_options=self.rpc_backend_options,
            )
        result = old_test_method(self, *args, **kwargs)
        if setup_rpc:
            rpc.shutdown(graceful=clean_shutdown)
        return result

    return cast("F", test)


def initialize_pg(init_method: str, rank: int, world_size: int) -> None:
    """Make the default group, if there is none."""
    if not is_initialized():
        init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)


def wait_until_node_failure(rank: int, expected_error_regex: str = ".*") -> str:
    """Call a worker until that fails with a matching error; return its text."""
    while True:
        try:
            rpc.rpc_sync(worker_name(rank), noop)
        except Exception as error:
            if re.search(expected_error_regex, str(error)):
                return str(error)
        time.sleep(_POLL_SECONDS)


def wait_until_pending_futures_and_users_flushed(timeout: float = 20) -> None:
    """Wait until this worker's references are known to their owners, and its values are there.

    Raises:
        ValueError: that took longer.
    """
    deadline = time.monotonic() + timeout
    while True:
        info = _rref_context_get_debug_info()
        pending = {name: info[name] for name in ("num_pending_futures", "num_pending_users")}
        if set(pending.values()) == {"0"}:
            return
        if time.monotonic() > deadline:
            raise ValueError(f"Timed out waiting to flush pending futures and users, had {pending}")
        time.sleep(_POLL_SECONDS)


def get_num_owners_and_forks() -> tuple[str, str]:
    """Return how many values this worker owns for others, and how many references others hold."""
    info = _rref_context_get_debug_info()
    return info["num_owner_rrefs"], info["num_forks"]


def wait_until_owners_and_forks_on_rank(
    num_owners: int, num_forks: int, rank: int, timeout: float = 20
) -> None:
    """Wait until a worker owns ``num_owners`` values, with ``num_forks`` references on other workers.

    Raises:
        ValueError: that took longer.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = rpc.rpc_sync(worker_name(rank), get_num_owners_and_forks, timeout=5)
        if found == (str(num_owners), str(num_forks)):
            return
        if time.monotonic() > deadline:
            raise ValueError(
                f"Timed out waiting {timeout} sec for {num_owners} owners and {num_forks} forks on rank, had"
                f" {found[0]} owners and {found[1]} forks"
            )
        time.sleep(_POLL_SECONDS)


def get_function_event(function_events: Sequence[Any], partial_event_name: str) -> Any:
    """Return the first profiled event whose name contains a text."""
    return [event for event in function_events if partial_event_name in event.name][0]  # noqa: RUF015


class RpcAgentTestFixture(ABC):
    """A mixin for test cases whose ranks are processes: the backend that they use as workers."""

    file_name: str

    @property
    def world_size(self) -> int:
        """Return how many ranks a test has."""
        return 4

    @property
    def init_method(self) -> str:
        """Return where workers meet."""
        if os.environ.get("RPC_INIT_WITH_TCP") == "1":
            return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return self.file_init_method

    @property
    def file_init_method(self) -> str:
        """Return the URL of the test's own file."""
        return INIT_METHOD_TEMPLATE.format(file_name=self.file_name)

    @property
    @abstractmethod
    def rpc_backend(self) -> Any:
        """The member of ``BackendType``."""

    @property
    @abstractmethod
    def rpc_backend_options(self) -> Any:
        """New options for it."""

    def setup_fault_injection(self, faulty_messages: Any, messages_to_delay: Any) -> None:  # noqa: B027
        """Prepare faults before the workers meet; backends that inject faults override this."""

    @abstractmethod
    def get_shutdown_error_regex(self) -> str:
        """Return a pattern of the errors of calls to workers that have shut down."""

    @abstractmethod
    def get_timeout_error_regex(self) -> str:
        """Return a pattern of the errors of calls that take too long."""


class TensorPipeRpcAgentTestFixture(RpcAgentTestFixture):
    """Uses the backend TENSORPIPE, which is our own engine."""

    @property
    def rpc_backend(self) -> Any:
        """The member of ``BackendType``."""
        return rpc.backend_registry.BackendType["TENSORPIPE"]

    @property
    def rpc_backend_options(self) -> Any:
        """New options for it."""
        return rpc.backend_registry.construct_rpc_backend_options(
            self.rpc_backend, init_method=self.init_method
        )

    def get_shutdown_error_regex(self) -> str:
        """Return a pattern that every text matches."""
        return ".*"

    def get_timeout_error_regex(self) -> str:
        """Return the pattern of torch's own message."""
        return "RPC ran for more than"
