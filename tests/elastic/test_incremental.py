"""A large state comes bit by bit to ranks that join, while the others train; the result does not show it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchestra as dist
from elastic.test_elastic_joining import Gone, Job
from elastic.training import alone, digest, go_on, make
from torchestra import elastic
from torchestra.elastic import incremental, state
from torchestra.elastic.blocks import Block, TensorBlocks
from torchestra.elastic.incremental import IncrementalTransfer
from torchestra.elastic.units import _BY_PARAMETER, Units

SHARDS, STEPS = 6, 16
UNITS = 8  # parameters of the network
unfailed = functools.lru_cache(alone)
Hook = Callable[[elastic.Shard], object]


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any state is a large one, and a step brings one parameter."""
    monkeypatch.setattr(state, "_AT_ONCE_BYTES", 0)
    for name in ("_FIRST_BYTES", "_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(incremental, name, 1)


class Watched(Job):
    """Run ranks, and note which steps each of them has computed shards of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[int]] = {}
        self.checkpoints: dict[str, elastic.Checkpoints] = {}

    def train(
        self,
        name: str,
        rank: int,
        minimum: int,
        hook: Hook = lambda shard: None,
        size: int | None = None,
        steps: int = STEPS,
        host: str | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start a rank; one without a size joins."""
        seen = self.steps.setdefault(name, [])
        if folder is not None:
            self.checkpoints[name] = elastic.Checkpoints(folder, every=5)

        def note(shard: elastic.Shard) -> None:
            seen.append(shard.step)
            hook(shard)

        def body() -> tuple[str, dict[str, Any], elastic.State]:
            network, optimizer, scheduler = make(rank, 0.0)
            checkpoints = self.checkpoints.get(name)
            mine = elastic.State(network, optimizer, scheduler=scheduler, checkpoints=checkpoints)
            go_on(mine, SHARDS, steps, note, minimum)
            if checkpoints is not None:
                checkpoints.wait()
            return name, digest(mine), mine

        self.start(rank, size, body, host)

    def check(self, *names: str, steps: int = STEPS) -> dict[str, elastic.State]:
        """Wait for all ranks, and have these end with the unfailed training's state; return theirs."""
        ended = self.finish()
        assert not [each for each in ended if isinstance(each, BaseException)]
        assert {name for name, _, _ in ended} == set(names)
        for name, told, _ in ended:
            assert told == unfailed(SHARDS, steps), name
        return {name: mine for name, _, mine in ended}


def leaving(when: Callable[[elastic.Shard], bool], before: Callable[[], object]) -> Hook:
    """Return a hook by which a rank leaves in the middle of a shard, when it has done something."""

    def hook(shard: elastic.Shard) -> None:
        if when(shard):
            before()
            raise Gone

    return hook


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_rank_that_joins_gets_one_parameter_in_each_step_and_then_shards(hosts: str) -> None:
    job = Watched()
    replace = leaving(lambda shard: shard.step == 2, lambda: job.train("new", 1, 3, host=hosts[1]))
    job.train("first", 0, 3, size=3, host=hosts[0])
    job.train("lost", 1, 3, replace, size=3, host=hosts[1])
    job.train("third", 2, 3, size=3, host=hosts[2])
    states = job.check("first", "new", "third")
    assert min(job.steps["new"]) == 2 + UNITS
    assert all(not each.filling and each.filled is None and each.units is None for each in states.values())
    (change,) = states["first"].changes
    assert (change.lost, change.joined, change.size) == ((1,), (1,), 3)


def test_all_is_there_when_the_training_ends_first() -> None:
    job = Watched()
    replace = leaving(lambda shard: shard.step == 2, lambda: job.train("new", 1, 2, steps=6))
    job.train("first", 0, 2, size=2, steps=6)
    job.train("lost", 1, 2, replace, size=2, steps=6)
    job.check("first", "new", steps=6)
    assert job.steps["new"] == []


def test_ranks_that_leave_and_join_while_others_lack_parameters_change_nothing() -> None:
    """In a step that begins anew another parameter comes, if the one before had arrived."""
    job = Watched()
    second = leaving(lambda shard: shard.step == 5, lambda: job.train("newer", 2, 3))
    first = leaving(lambda shard: shard.step == 2, lambda: job.train("new", 1, 3))
    job.train("first", 0, 3, size=3)
    job.train("lost", 1, 3, first, size=3)
    job.train("also lost", 2, 3, second, size=3)
    job.check("first", "new", "newer")
    assert min(job.steps["new"]) - 2 in (UNITS - 1, UNITS)
    assert min(job.steps["newer"]) == 5 + UNITS


@pytest.mark.parametrize("method", ["begin", "_take_over", "clear_gradients", "settle"])
def test_a_rank_that_leaves_with_some_parameters_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    job, left = Watched(), False
    original = getattr(IncrementalTransfer, method)

    def leave(transfer: IncrementalTransfer, *args: Any) -> Any:
        nonlocal left
        if transfer._state.filled == 3 and not left:
            left = True
            job.train("newer", 1, 3)
            raise Gone
        return original(transfer, *args)

    monkeypatch.setattr(IncrementalTransfer, method, leave)
    job.train("first", 0, 3, size=3)
    replace = leaving(lambda shard: shard.step == 2, lambda: job.train("new", 1, 3))
    job.train("lost", 1, 3, replace, size=3)
    job.train("third", 2, 3, size=3)
    job.check("first", "third", "newer")
    assert left
    assert job.steps["new"] == []


def lose_all_that_have_the_state(job: Watched, folder: Path | None = None) -> None:
    """Have the last one of them leave when its checkpoint, if it has any, is written."""
    replace = leaving(lambda shard: shard.step == 2, lambda: job.train("new", 1, 1, folder=folder))
    leave = leaving(lambda shard: shard.step == 6, lambda: folder and job.checkpoints["first"].wait())
    job.train("first", 0, 2, leave, size=2, folder=folder)
    job.train("lost", 1, 2, replace, size=2, folder=folder)


def test_a_state_that_nobody_has_whole_any_more_is_an_error() -> None:
    job = Watched()
    lose_all_that_have_the_state(job)
    (error,) = job.finish()
    assert type(error) is dist.DistError
    assert "all ranks that had it whole are gone, while rank 0 still got parts of it" in str(error)


def test_a_state_that_nobody_has_whole_any_more_is_read_from_a_checkpoint_of_the_others(
    tmp_path: Path,
) -> None:
    """It was written while the rank that goes on from it got its parameters."""
    job = Watched()
    lose_all_that_have_the_state(job, tmp_path)
    job.check("new")
    assert job.steps["new"][0] == 5


@pytest.mark.parametrize("times", [2, 1000])
def test_what_comes_damaged_is_sent_again_and_again_and_then_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    job, count = Watched(), 0

    class Damaging(TensorBlocks):
        """Change a bit of what is sent."""

        def to_send(self, block: Block) -> list[torch.Tensor]:
            nonlocal count
            count += 1
            found = [each.clone() for each in super().to_send(block)]
            found[-1][-1] ^= count <= times
            return found

    monkeypatch.setattr(incremental, "TensorBlocks", Damaging)
    replace = leaving(lambda shard: shard.step == 2, lambda: job.train("new", 1, 2))
    job.train("first", 0, 2, size=2)
    job.train("lost", 1, 2, replace, size=2)
    if times == 2:
        job.check("first", "new")
    else:
        errors = job.finish()
        assert [type(each) for each in errors] == [dist.DistError] * 2
        for each in errors:
            assert "parameters arrived with another checksum 4 times, on rank 1 of group" in str(each)


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    return module.to(torch.float64)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int, units: int) -> None:
    """Make a step with gradients for the first parameters only."""
    generator = torch.Generator().manual_seed(number)
    for index, each in enumerate(module.parameters()):
        gradient = torch.randn(each.shape, dtype=each.dtype, generator=generator)
        if isinstance(optimizer, torch.optim.SparseAdam):
            gradient = gradient.to_sparse()
        each.grad = gradient if index < units else None
    optimizer.step()


@pytest.mark.parametrize("kind", _BY_PARAMETER, ids=lambda kind: kind.__name__)
def test_parameters_that_come_one_by_one_are_updated_as_if_they_had_come_at_once(kind: Any) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    here, there = small(0), small(1)
    optimizers = [kind(each.parameters(), **{"lr": 0.1, **options}) for each in (here, there)]
    sent, received = (
        Units.of({"model": module, "optimizer": each})
        for module, each in zip((here, there), optimizers, strict=True)
    )
    assert sent is not None
    assert received is not None
    assert sent.digest == received.digest
    for number in range(6):
        if number in (2, 4):
            index = number // 2 - 1
            received.all[index].load(copy.deepcopy(sent.all[index].value()))
        step(here, optimizers[0], number, 2)
        step(there, optimizers[1], number, number // 2)
    for mine, theirs in zip(there.parameters(), here.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [each.bytes for each in sent.all] == [each.bytes for each in received.all]


def test_only_what_is_updated_parameter_by_parameter_comes_one_by_one() -> None:
    module = small(0)

    def units(optimizer: torch.optim.Optimizer) -> Units | None:
        return Units.of({"model": module, "optimizer": optimizer})

    class Own(torch.optim.SGD):
        """Might look at anything."""

    hooked = torch.optim.SGD(module.parameters())
    assert units(hooked) is not None
    hooked.register_step_pre_hook(lambda *_: None)
    for each in (hooked, Own(module.parameters()), torch.optim.LBFGS(module.parameters())):
        assert units(each) is None
    twice = Units.of({str(index): torch.optim.SGD(module.parameters()) for index in range(2)})
    assert twice is None
    assert Units.of({"model": module}) is None
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert units(torch.optim.SGD(module.parameters())) is None
    finally:
        handle.remove()
