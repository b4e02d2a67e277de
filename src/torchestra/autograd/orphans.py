"""Contexts whose maker is gone, for one of the workers: which those are, and what errors say of them."""

from __future__ import annotations

from torchestra.autograd.graph_task import Note
from torchestra.errors import WorkerFailedError
from torchestra.rpc.agent import Agent

COUNT_BITS = 48
MAX_COUNT = (1 << COUNT_BITS) - 1


def made_by(context_id: int) -> int:
    """Return the number of the worker that made a context."""
    return context_id >> COUNT_BITS


def is_orphan(agent: Agent, context_id: int) -> bool:
    """Return whether the worker that made a context is gone, for this one."""
    return made_by(context_id) in agent.liveness.gone


def lost_note(agent: Agent, context_id: int) -> Note:
    """Return what a worker tells others when it ends its part of an orphan."""
    return Note(context_id, "lost", None, (agent.liveness.end_reason(made_by(context_id)),))


def not_found(agent: Agent, context_id: int) -> WorkerFailedError | None:
    """Return the error where a worker has no such context any more as it is an orphan; None if it is none."""
    if not is_orphan(agent, context_id):
        return None
    maker = made_by(context_id)
    return WorkerFailedError(
        f"Could not find autograd context with id: {context_id} on worker {_who(agent, agent.number)}: worker"
        f" {_who(agent, maker)}, which made it, {agent.liveness.end_reason(maker)}",
        agent.workers[maker].name,
    )


def part_is_lost(agent: Agent, source: int, context_id: int, how: str) -> WorkerFailedError:
    """Return the error where another worker has ended its part of a context, whose maker is gone for it."""
    return WorkerFailedError(
        f"worker {_who(agent, source)} has ended its part of autograd context {context_id}, as for it worker"
        f" {_who(agent, made_by(context_id))}, which made it, {how}",
        agent.workers[source].name,
    )


def _who(agent: Agent, number: int) -> str:
    info = agent.workers.known(number)
    return f"{info.name!r} (rank {info.id})"
