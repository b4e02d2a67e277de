"""What the pytest process makes of what ranks tell: the failure that others followed from comes first."""

from __future__ import annotations

import os
import pickle
import select
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from forking import Child
from torchestra.errors import RankFailedError
from torchestra.testing import fork_server
from torchestra.testing.outcomes import Outcome, first_failure
from torchestra.testing.rank_pool import RankWorld

GONE = ("raised", 0, ("RankFailedError: rank 1 died", True))
WRONG = ("raised", 0, ("AssertionError", False))
KILLED = ("ended", 1, b"", -9)


def ended(rank: int, error: BaseException) -> tuple[Any, ...]:
    return "ended", rank, pickle.dumps(Outcome(rank, error, str(error))), None


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ([KILLED, GONE, ended(0, RankFailedError("rank 1 died"))], 1),
        ([GONE, KILLED, ended(0, RankFailedError("rank 1 died"))], 1),
        ([GONE, ended(0, RankFailedError("rank 1 died")), KILLED], 1),
        ([GONE, ("ended", 0, b"", -15), KILLED], 1),  # ended before it had told where
        ([WRONG, ended(0, AssertionError("1 == 2")), KILLED], 0),
        ([WRONG, KILLED, ended(0, AssertionError("1 == 2"))], 0),
    ],
)
def test_a_death_comes_before_what_others_raise_because_of_it(told: list[Any], cause: int) -> None:
    messages = iter(told)
    connection: Any = SimpleNamespace(poll=lambda timeout: True, recv=lambda: next(messages))
    request: Any = SimpleNamespace(size=2, may_die=())
    world = RankWorld(connection, [], request)
    while world.running:
        world.wait(0.0)
    first = first_failure(world.outcomes.values())
    assert first is not None
    assert first.rank == cause


def test_no_rank_outlives_the_server_that_forked_it() -> None:
    reading, writing = os.pipe()

    def serve_and_crash() -> None:
        fork_server.Child.fork(lambda connection: signal.pause())
        os.kill(os.getpid(), signal.SIGKILL)

    server = Child(serve_and_crash)
    os.close(writing)
    with pytest.raises(AssertionError, match="it was killed"):
        server.result()
    assert select.select([reading], [], [], 60)[0], "the rank lives, with all that it has inherited"
    os.close(reading)
