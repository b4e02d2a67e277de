"""A state comes block by block to ranks that join, while it changes; what has changed comes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from elastic.test_elastic_joining import Gone, Job
from elastic.training import digest, go_on, make
from torchestra import elastic
from torchestra.elastic import blocks, fetching, incremental, state
from torchestra.elastic.blocks import TensorBlocks
from torchestra.elastic.fetching import Fetched
from torchestra.elastic.parts import flatten_tensors
from torchestra.elastic.prefetch_buffer import PrefetchBuffer

SHARDS, STEPS = 3, 36
BLOCK_BYTES = 1024
ELEMENTS = 2560  # ten blocks
Hook = Callable[[elastic.Shard], object]


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Fetched]:
    """Have any state be a large one, of which a step brings one block; return what was fetched at once."""
    monkeypatch.setattr(state, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(fetching, "_SHORT_BYTES", 0)
    for name in ("_FIRST_BYTES", "_LEAST_BYTES", "_MOST_BYTES", "_PREFETCHED_BYTES"):
        monkeypatch.setattr(incremental, name, 1)
    found: list[Fetched] = []
    original = state.fetch

    def fetch(*args: Any) -> Fetched:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(state, "fetch", fetch)
    return found


class Training(Job):
    """Run ranks whose state has a tensor that changes a little, and a buffer that does not."""

    def __init__(self, own_update: bool) -> None:
        super().__init__()
        self.own_update = own_update
        self.steps: dict[str, list[int]] = {}
        self.updates: dict[str, list[int]] = {}

    def train(self, name: str, rank: int, hook: Hook = lambda shard: None, size: int | None = None) -> None:
        """Start a rank of three; one without a size joins."""
        seen = self.steps.setdefault(name, [])

        def note(shard: elastic.Shard) -> None:
            seen.append(shard.step)
            hook(shard)

        def body() -> tuple[str, dict[str, Any]]:
            network, optimizer, scheduler = make(rank, 0.0)
            network.register_buffer("constant", torch.full((ELEMENTS,), float(rank)))
            further = torch.full((ELEMENTS,), float(rank))
            mine = elastic.State(network, optimizer, scheduler=scheduler, further=further)

            def update() -> None:
                self.updates.setdefault(name, []).append(mine.step)
                optimizer.step()
                scheduler.step()
                further[mine.step] += 1.0

            go_on(mine, SHARDS, STEPS, note, 3, update if self.own_update else None)
            return name, digest(mine) | {"further": further.numpy().tobytes()}

        self.start(rank, size, body)

    def check(self, *names: str) -> None:
        """Wait for all ranks, and have these end with one state."""
        ended = self.finish()
        assert not [each for each in ended if isinstance(each, BaseException)]
        assert {name for name, _ in ended} == set(names)
        first = ended[0][1]
        assert all(told == first for _, told in ended)
        counted = 1.0 if self.own_update else 0.0
        further = torch.frombuffer(bytearray(first["further"]), dtype=torch.float32)
        assert further.tolist() == [counted] * STEPS + [0.0] * (ELEMENTS - STEPS)
        assert not any(first["constant"])


def leaving(step: int, before: Callable[[], object]) -> Hook:
    """Return a hook by which a rank leaves in the middle of a shard, when it has done something."""

    def hook(shard: elastic.Shard) -> None:
        if shard.step == step:
            before()
            raise Gone

    return hook


@pytest.mark.parametrize("own_update", [True, False])
def test_blocks_come_step_by_step_and_in_the_end_only_those_that_differ(
    own_update: bool, fetched: list[Fetched]
) -> None:
    job = Training(own_update)
    job.train("first", 0, size=3)
    job.train("lost", 1, leaving(2, lambda: job.train("new", 1)), size=3)
    job.train("third", 2, size=3)
    job.check("first", "new", "third")
    steps = min(job.steps["new"]) - 2
    if own_update:
        assert job.updates["new"] == list(range(min(job.steps["new"]), STEPS))
    assert steps >= 2 * ELEMENTS * 4 // BLOCK_BYTES
    at_last = [each for each in fetched if "further" in each.values.get(0, {})][-1]
    assert at_last.bytes <= 6 * BLOCK_BYTES


@pytest.mark.parametrize("own_update", [True, False])
def test_a_death_in_between_changes_nothing(own_update: bool) -> None:
    """A step begins anew, so a rank that joins sets its buffers back: to what they were before they came."""
    job = Training(own_update)
    job.train("first", 0, size=3)
    job.train("lost", 1, leaving(2, lambda: job.train("new", 1)), size=3)
    job.train("also lost", 2, leaving(17, lambda: job.train("newer", 2)), size=3)
    job.check("first", "new", "newer")


@pytest.mark.parametrize("method", ["finish", "settle"])
def test_a_rank_that_leaves_with_some_blocks_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    job, left = Training(own_update=True), False
    original = getattr(incremental.IncrementalTransfer, method)

    def leave(transfer: incremental.IncrementalTransfer, *args: Any) -> Any:
        nonlocal left
        if transfer._state.filled == 3 and not left:
            left = True
            job.train("newer", 1)
            raise Gone
        return original(transfer, *args)

    monkeypatch.setattr(incremental.IncrementalTransfer, method, leave)
    job.train("first", 0, size=3)
    job.train("lost", 1, leaving(2, lambda: job.train("new", 1)), size=3)
    job.train("third", 2, size=3)
    job.check("first", "newer", "third")
    assert left
    assert job.steps["new"] == []


def test_a_state_that_does_not_fit_is_refused_by_all() -> None:
    """It is refused as where all comes at once: when the blocks have come."""
    told: list[str] = []

    class Odd(Training):
        def train(
            self, name: str, rank: int, hook: Hook = lambda shard: None, size: int | None = None
        ) -> None:
            def body() -> None:
                network, optimizer, scheduler = make(rank, 0.0)
                further = torch.zeros(ELEMENTS + (name == "new"))
                mine = elastic.State(network, optimizer, scheduler=scheduler, further=further)
                with pytest.raises(dist.DistError) as caught:
                    go_on(mine, SHARDS, STEPS, hook, 2, optimizer.step)
                told.append(str(caught.value))

            self.start(rank, size, body)

    job = Odd(own_update=True)
    job.train("first", 0, size=2)
    job.train("lost", 1, leaving(2, lambda: job.train("new", 1)), size=2)
    assert job.finish() == [None, None]
    assert all("rank 1 of group" in each and "further is of torch.float32" in each for each in told)


class Replay:
    """Keep a tensor of each step, as a buffer of experiences does."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.kept), "count": len(self.kept)}

    def load_state_dict(self, told: dict[str, Any]) -> None:
        self.kept = list(told["kept"])


def test_a_state_that_grows_meanwhile_comes_whole() -> None:
    """Blocks that came before are of other tensors then, and come again."""

    class Growing(Training):
        def train(
            self, name: str, rank: int, hook: Hook = lambda shard: None, size: int | None = None
        ) -> None:
            def body() -> list[list[float]]:
                network, optimizer, _ = make(rank, 0.0)
                replay, further = Replay(), torch.full((ELEMENTS,), float(rank))
                mine = elastic.State(network, optimizer, replay=replay, further=further)

                def update() -> None:
                    optimizer.step()
                    if mine.step < 14:
                        replay.kept.append(torch.full((300,), float(mine.step)))

                go_on(mine, SHARDS, 24, hook, 2, update)
                return [each.unique().tolist() for each in (*replay.kept, further)]

            self.start(rank, size, body)

    job = Growing(own_update=True)
    job.train("first", 0, size=2)
    job.train("lost", 1, leaving(2, lambda: job.train("new", 1)), size=2)
    assert job.finish() == [[[float(step)] for step in range(14)] + [[0.0]]] * 2


def test_a_block_that_changes_here_after_it_has_come_is_known_as_it_is() -> None:
    """Receiving itself is no change, also of short pieces, which are copied."""
    sent = {"long": torch.arange(1000.0), "short": torch.arange(10.0), "other": torch.arange(300.0)}
    own = {name: torch.zeros_like(each) for name, each in sent.items()}
    skeleton, tensors = flatten_tensors(sent)
    theirs, mine = TensorBlocks(tensors), PrefetchBuffer(skeleton, own)
    sums = {number: theirs.checksum(block) for number, block in enumerate(mine.blocks)}
    for number, block in enumerate(mine.blocks):
        into = mine.tensor_blocks.to_receive(block)
        for target, message in zip(into.messages, theirs.to_send(block), strict=True):
            target.copy_(message)
        into.finish()
        mine.arrived(number, sums[number] if number else 0)
    came = {number: each for number, each in sums.items() if number}
    assert mine.signature().checksums == came
    assert mine.value()["short"] is not None
    own["other"].add_(1.0)
    assert mine.signature().checksums != came
    own["other"].sub_(1.0)
    assert mine.signature().checksums == came
