"""What launchers write for each other into their store, as JSON: see nodes.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchestra.launcher.root_cause import NodeFailure
from torchestra.store.unreadable import reading

_JOB: Mapping[str, type] = {"nnodes": int, "torchestra": str, "node": int, "who": str}
_MEMBER: Mapping[str, type] = {"nproc": int, "port": int}


def read_job(text: bytes) -> dict[str, Any]:
    """Return the first launcher's description of the job.

    Raises:
        DistStoreError: it is something else.
    """
    with reading("the description of the job, in the launchers' store"):
        return _checked(json.loads(text), _JOB)


def read_members(text: bytes, nnodes: int) -> list[dict[str, Any]]:
    """Return the entries of the launchers of all nodes, by node.

    Raises:
        DistStoreError: they are something else.
    """
    with reading("the list of launchers, in their store"):
        members = json.loads(text)
        if not isinstance(members, list) or len(members) != nnodes:
            raise ValueError(f"not {nnodes} launchers: {members!r:.100}")
        for member in members:
            replicas = member.get("store", ""), member.get("spare", "")
            if _checked(member, _MEMBER)["nproc"] < 1 or not all(isinstance(each, str) for each in replicas):
                raise ValueError(f"no launcher: {member!r:.100}")
        return members


def replicas_of(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where the launchers that began the job serve replicas of its store, a spare host's last."""
    return [member[key] for key in ("store", "spare") for member in members if key in member]


def read_failure(text: bytes) -> NodeFailure:
    """Return which node failed first, and why.

    Raises:
        DistStoreError: the store has something else there.
    """
    with reading("the failure of another node, in the launchers' store"):
        failure = NodeFailure(*json.loads(text))
        if list(map(type, failure)) != [int, int, str]:
            raise ValueError(f"no failure: {failure!r:.100}")
        return failure


def _checked(value: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(value, dict) or any(type(value.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError(f"it does not have {', '.join(kinds)}: {value!r:.100}")
    return value
