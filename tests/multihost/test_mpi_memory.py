"""What MPI may still use stays in memory when the operation was left and its caller has gone on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchestra.engine.multihost import mpi_bridge
from torchestra.engine.multihost.bridge import BridgeError


class Bridge:
    """Stand in for the bridge of two works under way, one that fails, and one that has ended."""

    def __init__(self) -> None:
        self.freed = False

    def test(self, requests: Any, times: int) -> bool:
        (request,) = requests
        if request == "fails":
            raise BridgeError("MPI: it has failed")
        return bool(request == "has ended")

    def Free(self) -> None:
        self.freed = True


@pytest.mark.parametrize(
    ("requests", "kept"),
    [
        (["runs", "has ended", "runs", "fails"], ["runs", "runs", "fails"]),
        (["has ended", "has ended"], []),
    ],
)
def test_all_that_mpi_may_still_use_is_kept_when_its_bridge_is_closed(
    requests: list[str], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first was; the tensors of the others were freed while MPI could write into them."""
    buried: list[Any] = []
    monkeypatch.setattr(mpi_bridge, "_buried", buried)
    bridge: Any = Bridge()
    works = []
    for request in requests:
        works.append(mpi_bridge._Work(bridge, lambda _, request=request: [request], torch.zeros(1)))
        works[-1].begin(None)
    mpi_bridge.MPIBridge._give_back(bridge, works)
    assert [work._requests[0] for work in buried] == kept
    assert bridge.freed is not bool(kept)
