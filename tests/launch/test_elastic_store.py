"""``torchestra run --elastic`` on one host: the job's store outlives the processes that serve it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tools.chaos_elastic import takes_part

from torchestra.launcher.membership_file import read_membership
from torchestra.store import ReplicatedStore
from torchestra.store.base import pauses

LONG = 90.0
SECRET = "of this test's job"
PROGRAM = """
    import os
    from torchestra.store import ReplicatedStore
    store = ReplicatedStore(os.environ["TORCHESTRA_STORE"].split(","))
    print(store.get("end").decode())
"""


@pytest.fixture
def job(start):
    return start(PROGRAM, 2, before=("--elastic", "1:2"), env={**os.environ, "TORCHESTRA_SECRET": SECRET})


def replicas(launcher: int, gone: int | None = None) -> list[dict[str, Any]]:
    """The replicas of a job's store once all take part, and the process that is gone is none of theirs."""
    for _ in pauses(LONG):
        served = (read_membership(launcher) or {}).get("store", [])
        if len(served) != 3 or gone in [each["pid"] for each in served]:
            continue
        if all(takes_part(each["address"], SECRET) for each in served):
            return served
    raise AssertionError("the replicas do not take part")


def test_a_process_that_serves_the_store_is_started_again_and_nothing_is_forgotten(job, nothing_left) -> None:
    """The one that is the primary in the beginning, then every other one: what they held is never lost."""
    served = replicas(job.process.pid)
    store = ReplicatedStore([each["address"] for each in served], LONG, secret=SECRET)
    for turn, victim in enumerate((0, 1, 2), 1):
        assert store.add("turns", 1) == turn
        os.kill(served[victim]["pid"], signal.SIGKILL)
        assert store.add("turns", 0) == turn
        before, served = served, replicas(job.process.pid, gone=served[victim]["pid"])
        assert [each["address"] for each in served] == [each["address"] for each in before]
    store.set("end", "of all")
    code, out, err = job.finish()
    store.close()
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] of all", "[rank 1] of all"]), err
    for victim in range(3):
        assert (
            f"torchestra: replica {victim} of the job's store was killed, and has been started again" in err
        )
    nothing_left()
