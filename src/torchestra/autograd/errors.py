"""Sends errors of a backward pass from the worker where they happened to the one that began it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torchestra.errors import BackwardError, RpcTimeoutError, WorkerFailedError
from torchestra.rpc import remote_errors

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

ErrorRecord: TypeAlias = "tuple[int, str, bytes | None, str]"
"""The rank, the error's message, and the results of rpc.remote_errors.describe()."""


def describe(agent: Agent, error: BaseException) -> ErrorRecord:
    """Return a record of this worker's error, to be sent."""
    described, text = remote_errors.describe(error, agent.info)
    return agent.number, str(error) or type(error).__name__, described, text


def rebuild(described: ErrorRecord) -> Exception:
    """Return the error to raise where the pass began, for one that happened on another worker."""
    rank, message, pickled, text = described
    cause = remote_errors.rebuild(pickled, text)
    if isinstance(cause, WorkerFailedError):
        return WorkerFailedError(message, cause.worker)
    if isinstance(cause, RpcTimeoutError):
        return RpcTimeoutError(message)
    return located(rank, f"{message}\n\n{text}" if text else message, cause)


def located(rank: int, message: str, cause: BaseException) -> Exception:
    """Return the error to raise where the pass began, for one that happened on a worker."""
    if isinstance(cause, (WorkerFailedError, RpcTimeoutError)):
        return cause
    error = BackwardError(f"Error on Node {rank}: {message}")
    error.__cause__ = cause
    return error
