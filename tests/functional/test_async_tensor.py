"""Results that wait when they are first used, and the table of those that nobody has waited for."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings

import pytest
import torch

import torchestra as dist
import torchestra.functional as funcol
from torchestra.communicator import work_registry
from torchestra.functional import AsyncCollectiveTensor
from torchestra.world.init import current_world
from warm_programs import FinalizedWarm, run_warm
from worlds import collect_until, run


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def waits_when_used() -> None:
    """Rank 1 comes to the collective only after rank 0 has done all that needs no waiting."""
    group = world()
    order = dist.new_group()
    assert isinstance(order, dist.ProcessGroup)
    if dist.get_rank() == 1:
        dist.barrier(order)
    result = funcol.all_reduce(torch.arange(6.0), "sum", group)
    assert type(result) is AsyncCollectiveTensor
    assert not result.completed
    views = [
        result.view(2, 3),
        result.reshape(3, 2),
        result[1:4],
        result.unsqueeze(0),
        result.view(2, 3).t(),
        result.detach(),
        result.expand(2, 6),
        *result.chunk(2),
    ]
    assert [type(view) for view in views] == [AsyncCollectiveTensor] * 9
    assert [view.shape for view in views[:3]] == [(2, 3), (3, 2), (3,)]
    assert work_registry.count(group) == 1
    if dist.get_rank() == 0:
        dist.barrier(order)
    total = result + 1
    assert type(total) is torch.Tensor
    assert result.completed
    assert work_registry.count(group) == 0
    assert total.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert views[4].tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    assert views[6].sum().item() == 60.0


def test_a_result_waits_when_its_values_are_first_asked_for() -> None:
    run("threads", 2, waits_when_used)


def uses() -> None:
    group = world()

    def fresh() -> torch.Tensor:
        return funcol.all_reduce(torch.ones(2), "sum", group)

    assert fresh().tolist() == [2.0, 2.0]
    assert repr(fresh()) == "AsyncCollectiveTensor(tensor([2., 2.]))"
    assert fresh().numpy().tolist() == [2.0, 2.0]
    assert fresh()[0].item() == 2.0
    assert bool(fresh().sum() == 4)
    assert torch.equal(torch.cat([fresh(), fresh()]), torch.full((4,), 2.0))
    assert torch.equal(fresh().mul_(2), torch.full((2,), 4.0))
    waited = funcol.wait_tensor(fresh())
    assert type(waited) is torch.Tensor
    result = fresh()
    assert isinstance(result, AsyncCollectiveTensor)
    assert type(result.wait()) is torch.Tensor
    assert torch.equal(result.wait(), result.trigger_wait())
    target = torch.zeros(2)
    target.copy_(fresh())
    assert target.tolist() == [2.0, 2.0]
    other = fresh()
    dist.all_reduce(other)  # as the argument of a plain collective
    assert other.tolist() == [4.0, 4.0]
    names, meta = result.__tensor_flatten__()
    again = AsyncCollectiveTensor.__tensor_unflatten__(
        {name: getattr(result, name) for name in names}, meta, result.size(), result.stride()
    )
    assert again.tolist() == [2.0, 2.0]
    assert result.__coerce_same_metadata_as_tangent__(None, torch.Tensor) is not None
    assert result.__coerce_same_metadata_as_tangent__(None, AsyncCollectiveTensor) is None
    for copied in (copy.deepcopy(fresh()), pickle.loads(pickle.dumps(fresh()))):
        assert copied.tolist() == [2.0, 2.0]
    plain = torch.ones(3)
    assert funcol.wait_tensor(plain) is plain


def test_every_way_to_use_a_result_waits() -> None:
    run("threads", 2, uses)


def used_in_another_thread() -> list[float]:
    result = funcol.all_reduce(torch.ones(2), "sum", world())
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.extend(result.tolist()))
    thread.start()
    thread.join()
    return seen


def test_a_result_may_be_used_in_another_thread() -> None:
    assert run("threads", 2, used_in_another_thread) == [[2.0, 2.0]] * 2


# -- those that nobody waits for


def dropped_results() -> int:
    group = world()
    for _ in range(200):
        funcol.all_reduce(torch.ones(2), "sum", group)
    dist.barrier()
    collect_until(lambda: work_registry.count(group) == 0)
    return work_registry.count(group)


def test_results_that_were_dropped_are_forgotten() -> None:
    assert run("threads", 2, dropped_results) == [0, 0]
    assert len(work_registry._entries) <= work_registry._FEW, "nor do they pile up"


def kept_result(how: str) -> list[str]:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    kept = funcol.all_gather_tensor(torch.ones(3), 0, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "group":
            dist.destroy_process_group(group)
        else:
            dist.destroy_process_group()
    assert kept.shape == (3 * 1,)
    assert not dist.is_initialized() or group.group_name not in current_world().groups
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("how", ["group", "all"])
def test_destroying_a_group_tells_of_results_that_were_never_waited_for(how: str) -> None:
    (told,) = run("threads", 1, kept_result, how)
    assert len(told) == 1
    assert "never waited for: 1, the first of all_gather_into_tensor on (3,) of group '1'" in told[0]


def test_the_end_of_the_process_tells_of_results_that_were_never_waited_for() -> None:
    program = """
import torch, torchestra as dist, torchestra.functional as funcol
dist.init_process_group("fake", rank=0, world_size=2)
kept = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
used = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 1
"""
    command = [sys.executable, "-c", program]
    ended = run_warm(command, capture_output=True, text=True, timeout=250, kind=FinalizedWarm)
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeWarning: results of functional collectives were never waited for: 1" in ended.stderr


def failed_and_dropped() -> list[str]:
    rank, group = dist.get_rank(), dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    funcol.all_reduce(torch.ones(1 + rank), "sum", group)
    dist.barrier(group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work_registry.report(group)
    return [str(each.message) for each in caught]


def test_failures_that_nobody_has_seen_are_told() -> None:
    told = run("threads", 2, failed_and_dropped)
    assert any("It had failed: CollectiveMismatchError" in text for texts in told for text in texts)
