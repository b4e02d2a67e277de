"""ZeroRedundancyOptimizer against the optimizer that it divides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer imports when it is first made; here, so that ranks need not
from torch import nn

import torchestra as dist
from torchestra.algorithms.join import Join, Joinable, JoinHook
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.optim import ZeroRedundancyOptimizer
from worlds import KINDS, run

SGD, Adam = torch.optim.SGD, torch.optim.Adam
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def network(seed: int = 0) -> nn.Sequential:
    """Small parameters, and one that is large enough to be sent by itself."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(8, 130), nn.Tanh(), nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 4))
        made.register_parameter("extra", nn.Parameter(torch.randn(3, 3)))
    return made


def compute_gradients(model: nn.Module, step: int) -> None:
    """The same on every rank, as if they had been averaged."""
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    loss = model(torch.randn(5, 8, generator=generator)).square().mean() + model.extra.cos().sum()
    loss.backward()


def trained(name: str, as_views: bool, ranks: int | None) -> list[torch.Tensor]:
    model = copy.deepcopy(NETWORK)
    optimizer_class, options = CLASSES[name]
    if ranks is None:
        optimizer = optimizer_class(model.parameters(), **options)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class, parameters_as_bucket_view=as_views, **options
        )
    for step in range(4):
        compute_gradients(model, step)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


NETWORK = network()


def close(found: list[torch.Tensor], expected: list[Any]) -> None:
    """Threads may add up in another order than the test itself does."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-5, rtol=1e-4)


def same_bits(first: list[torch.Tensor], *others: list[torch.Tensor]) -> bool:
    return all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_every_rank_ends_where_one_optimizer_would(kind: str, name: str, as_views: bool) -> None:
    expected = trained(name, as_views, None)
    told = run(kind, 3, trained, name, as_views, 3)
    close(told[0], expected)
    assert same_bits(*told)


def test_shares_are_even_and_each_parameter_is_in_one() -> None:
    sizes = [9, 7, 5, 3]

    def body() -> tuple[list[int], list[int]]:
        parameters = [
            nn.Parameter(torch.zeros(size, 1)) for _ in range(dist.get_world_size()) for size in sizes
        ]
        zero = ZeroRedundancyOptimizer(parameters, SGD, lr=0.1)
        mine = zero.optim.param_groups[0]["params"]
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        return [parameter.numel() for parameter in mine], [places[id(parameter)] for parameter in mine]

    for size in (1, 2, 4):
        told = run("threads", size, body)
        assert [sum(numels) for numels, _ in told] == [sum(sizes)] * size
        assert sorted(place for _, places in told for place in places) == list(range(4 * size))


def test_more_ranks_than_parameters() -> None:
    """Some ranks have nothing to update, and take part all the same."""

    def body(as_views: bool) -> tuple[int, float]:
        parameter = nn.Parameter(torch.zeros(2))
        zero = ZeroRedundancyOptimizer([parameter], SGD, parameters_as_bucket_view=as_views, lr=1.0)
        parameter.grad = torch.ones(2)
        zero.step()
        return len(zero.optim.param_groups[0]["params"]), parameter.sum().item()

    for as_views in (False, True):
        assert run("threads", 3, body, as_views) == [(1, -2), (0, -2), (0, -2)]


def test_parameter_groups_keep_their_options() -> None:
    def body() -> list[torch.Tensor]:
        model = copy.deepcopy(NETWORK)
        every = list(model.parameters())
        groups = [{"params": every[:2], "lr": 0.5}, {"params": iter(every[2:]), "momentum": 0.3}]
        zero = ZeroRedundancyOptimizer(groups, SGD, lr=0.1)
        assert [group["lr"] for group in zero.param_groups] == [0.5, 0.1]
        assert [group["momentum"] for group in zero.param_groups] == [0, 0.3]
        for step in range(3):
            compute_gradients(model, step)
            zero.step()
        return [parameter.detach() for parameter in every]

    alone = copy.deepcopy(NETWORK)
    every = list(alone.parameters())
    optimizer = SGD([{"params": every[:2], "lr": 0.5}, {"params": every[2:], "momentum": 0.3}], lr=0.1)
    for step in range(3):
        compute_gradients(alone, step)
        optimizer.step()
    for found in run("threads", 2, body):
        close(found, every)


@pytest.mark.parametrize("as_views", [False, True])
def test_parameters_may_be_added_and_keep_the_state_of_the_others(as_views: bool) -> None:
    def body() -> list[torch.Tensor]:
        model = copy.deepcopy(NETWORK)
        every = list(model.parameters())
        zero = ZeroRedundancyOptimizer(every[:3], Adam, parameters_as_bucket_view=as_views, lr=0.01)
        for step in range(4):
            if step == 2:
                zero.add_param_group({"params": every[3:], "lr": 0.1})
            compute_gradients(model, step)
            zero.step()
        return [parameter.detach() for parameter in every]

    alone = copy.deepcopy(NETWORK)
    every = list(alone.parameters())
    optimizer = Adam(every[:3], lr=0.01)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": every[3:], "lr": 0.1})
        compute_gradients(alone, step)
        optimizer.step()
    for found in run("threads", 3, body):
        close(found, every)


@pytest.mark.parametrize("as_views", [False, True])
def test_parameters_may_be_frozen_and_thawed(as_views: bool) -> None:
    def body(ranks: int | None) -> list[torch.Tensor]:
        model = copy.deepcopy(NETWORK)
        optimizer: Any = (
            Adam(model.parameters(), lr=0.01)
            if ranks is None
            else ZeroRedundancyOptimizer(
                model.parameters(), Adam, parameters_as_bucket_view=as_views, lr=0.01
            )
        )
        for step in range(6):
            model[2].weight.requires_grad_(step in (0, 1, 4, 5))
            compute_gradients(model, step)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = body(None)
    for found in run("threads", 2, body, 2):
        close(found, expected)


def test_learning_rates_may_be_scheduled_and_closures_given() -> None:
    def body() -> tuple[list[float], float]:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        zero = ZeroRedundancyOptimizer(parameters, SGD, lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, 0.5)

        def closure() -> torch.Tensor:
            zero.zero_grad()
            loss = sum(parameter.sum() for parameter in parameters)
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(zero.step(closure).item())
            scheduler.step()
        return losses, parameters[0][0].item()

    assert run("threads", 2, body) == [([4.0, 0.0, -2.0], 1 - 1 - 0.5 - 0.25)] * 2


def test_gradients_are_set_to_none() -> None:
    def body() -> list[bool]:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        zero = ZeroRedundancyOptimizer(parameters, SGD, lr=1.0)
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        zero.zero_grad()
        return [parameter.grad is None for parameter in parameters]

    assert run("threads", 2, body) == [[True] * 3] * 2


# -- state


def consolidated(to: int, as_views: bool) -> tuple[Any, list[torch.Tensor]]:
    """The state after some steps, as one rank has it; on the others, what it says."""
    model = copy.deepcopy(NETWORK)
    zero = ZeroRedundancyOptimizer(model.parameters(), Adam, parameters_as_bucket_view=as_views, lr=0.01)
    for step in range(2):
        compute_gradients(model, step)
        zero.step()
    zero.consolidate_state_dict(to)
    try:
        return zero.state_dict(), [parameter.detach() for parameter in model.parameters()]
    except RuntimeError as error:
        return str(error), []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", [0, 2])
def test_the_state_of_all_is_that_of_one_optimizer(kind: str, to: int) -> None:
    alone = copy.deepcopy(NETWORK)
    optimizer = Adam(alone.parameters(), lr=0.01)
    for step in range(2):
        compute_gradients(alone, step)
        optimizer.step()
    for rank, (state, _) in enumerate(run(kind, 3, consolidated, to, kind == "threads")):
        if rank == to:
            torch.testing.assert_close(state, optimizer.state_dict(), atol=1e-5, rtol=1e-4)
        else:
            assert state.startswith("Optimizer state has not been consolidated on this rank. Please call")
            assert f"`consolidate_state_dict(to={rank})` on all ranks" in state


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_goes_on_from_a_saved_state_on_any_number_of_ranks(ranks: int, as_views: bool) -> None:
    (state, parameters), *_ = run("threads", 3, consolidated, 0, as_views)
    before = copy.deepcopy(state)

    def body() -> list[torch.Tensor]:
        model = copy.deepcopy(NETWORK)
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(saved)
        zero = ZeroRedundancyOptimizer(model.parameters(), Adam, parameters_as_bucket_view=as_views, lr=9.0)
        zero.load_state_dict(state)
        assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.01
        for step in (2, 3):
            compute_gradients(model, step)
            zero.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained("Adam", as_views, None)
    for found in run("threads", ranks, body):
        close(found, expected)
    torch.testing.assert_close(state, before, atol=0, rtol=0)


def test_a_state_is_as_old_as_its_consolidation() -> None:
    def body() -> float:
        parameter = nn.Parameter(torch.zeros(1))
        zero = ZeroRedundancyOptimizer([parameter], SGD, lr=1.0, momentum=0.5)
        for _ in range(2):
            parameter.grad = torch.ones(1)
            zero.step()
        zero.consolidate_state_dict()
        parameter.grad = torch.ones(1)
        zero.step()
        return zero.state_dict()["state"][0]["momentum_buffer"].item() if dist.get_rank() == 0 else 0.0

    assert run("threads", 2, body)[0] == 1.5


def test_a_state_without_the_parameters_added_since_is_not_given_away() -> None:
    def body() -> int:
        parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
        zero = ZeroRedundancyOptimizer(parameters[:2], SGD, lr=1.0)
        zero.consolidate_state_dict()
        zero.add_param_group({"params": parameters[2:]})
        with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
            zero.state_dict()
        zero.consolidate_state_dict()
        return len(zero.state_dict()["param_groups"]) if dist.get_rank() == 0 else 2

    assert run("threads", 2, body) == [2, 2]


def test_states_of_other_parameters_are_refused() -> None:
    def body() -> None:
        zero = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2))], SGD, lr=0.1)
        for others, text in (
            ([{"params": [nn.Parameter(torch.zeros(2))]}] * 1 + [{"params": [nn.Parameter(torch.zeros(1))]}],
             "a different number of parameter groups: 2, and this optimizer has 1"),
            ([nn.Parameter(torch.zeros(2)) for _ in range(2)],
             "doesn't match the size of optimizer's group: group 0 has 2 parameters, and here 1"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=text):
                zero.load_state_dict(SGD(others, lr=0.1).state_dict())
        with pytest.raises(ValueError, match="`to` is 2, but the group has ranks 0 to 1"):
            zero.consolidate_state_dict(to=2)

    run("threads", 2, body)


# -- groups, Join, refusals


def test_a_group_of_some_ranks_shares_among_itself() -> None:
    def body() -> tuple[int, int, float] | str:
        group = dist.new_group([1, 2])
        parameter = nn.Parameter(torch.zeros(2))
        try:
            zero = ZeroRedundancyOptimizer([parameter], SGD, process_group=group, lr=1.0)
        except ValueError as error:
            return str(error)
        parameter.grad = torch.full((2,), float(zero.global_rank))
        zero.step()
        zero.consolidate_state_dict(1)
        return zero.rank, zero.global_rank, parameter[0].item()

    outsider, first, second = run("threads", 3, body)
    assert "this rank is <no member of group" in outsider
    assert (first, second) == ((0, 1, -1.0), (1, 2, -1.0))


class Averaging(Joinable):
    """Averages the gradients of some parameters over the ranks that have any; joined ranks get them too."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameters = parameters

    def __call__(self) -> None:
        work = Join.notify_join_context(self)
        self.reduce(int(work.result()[0]) if work else dist.get_world_size())

    def reduce(self, active: int) -> None:
        count = torch.tensor(float(active))
        dist.broadcast(count, src=dist.get_world_size() - 1)
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= count

    def join_hook(self, **options: Any) -> JoinHook:
        return AveragingHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class AveragingHook(JoinHook):
    def __init__(self, owner: Averaging) -> None:
        self.owner = owner

    def main_hook(self) -> None:
        for parameter in self.owner.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.owner.reduce(0)


def joined(as_views: bool) -> list[float]:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    zero = ZeroRedundancyOptimizer(parameters, SGD, parameters_as_bucket_view=as_views, lr=1.0)
    averaging = Averaging(parameters)
    with Join([averaging, zero]):
        for _ in range(dist.get_rank() + 1):
            for parameter in parameters:
                parameter.grad = torch.full((2,), 1.0 + dist.get_rank())
            averaging()
            zero.step()
    return [parameter[0].item() for parameter in parameters]


@pytest.mark.parametrize("kind", KINDS)
def test_a_joined_rank_goes_on_to_update_its_share(kind: str) -> None:
    """Ranks have 1, 2 and 3 inputs; steps are by the mean over those that have one."""
    expected = -((1 + 2 + 3) / 3 + (2 + 3) / 2 + 3)
    assert run(kind, 3, joined, kind == "threads") == [[expected] * 3] * 3


def test_alone_in_a_join_it_announces_the_steps() -> None:
    def body() -> float:
        parameter = nn.Parameter(torch.zeros(2))
        zero = ZeroRedundancyOptimizer([parameter], SGD, lr=1.0)
        parameter.grad = torch.ones(2)
        with Join([zero]):
            for _ in range(2 * dist.get_rank() + 1):
                zero.step()
        return parameter[0].item()

    assert run("threads", 2, body) == [-3, -3]


def test_what_is_no_list_of_parameters_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2))
    sparse = torch.sparse_coo_tensor(size=(2, 3), check_invariants=False)
    refused: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "got an empty parameter list"),
        (torch.zeros(1), TypeError, "should be an iterable of Tensors, but got torch.FloatTensor"),
        (1.2, TypeError, "should be an iterable of Tensors or dicts, but got float"),
        ([{"params": [weight]}, weight], TypeError, "should be an iterable of Tensors or dicts"),
        ([weight, 42], TypeError, "should be an iterable of Tensors or dicts"),
        ([{"lr": 0.1}], ValueError, "must have a 'params' key mapping to the parameters"),
        ([sparse], ValueError, "only supports using the same dense type for all parameters"),
        ([torch.zeros(1), torch.zeros(1).double()], ValueError, "torch.FloatTensor and torch.DoubleTensor"),
        ([nn.Parameter(torch.zeros(1, device="meta"))], ValueError, "a parameter is on device meta"),
    ]

    def body() -> None:
        for params, error, text in refused:
            with pytest.raises(error, match=text):
                ZeroRedundancyOptimizer(params, SGD, lr=0.1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
            ZeroRedundancyOptimizer([weight], SGD, learning_rate=0.1)
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            ZeroRedundancyOptimizer([weight], SGD, lr=-1)
        with pytest.raises(ValueError, match="LBFGS needs a closure that evaluates the model in each step"):
            ZeroRedundancyOptimizer([weight], torch.optim.LBFGS, overlap_with_ddp=True)

    run("threads", 2, body)


def test_before_the_buckets_of_a_model_are_known_there_is_no_state() -> None:
    def body() -> None:
        zero = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2))], SGD, overlap_with_ddp=True, lr=0.1)
        for call in (zero.state_dict, zero.consolidate_state_dict, lambda: zero.load_state_dict({})):
            with pytest.raises(
                RuntimeError, match="until this ZeroRedundancyOptimizer instance has been fully"
            ):
                call()
        with pytest.raises(RuntimeError, match="only supports a single parameter group"):
            zero.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert zero.step() is None

    run("threads", 2, body)


def test_one_collective_per_step_with_bucket_views() -> None:
    def body(as_views: bool) -> list[str]:
        model = copy.deepcopy(NETWORK)
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, parameters_as_bucket_view=as_views, lr=0.1)
        compute_gradients(model, 0)
        communicator = dist.group.WORLD.communicator
        calls = []
        collective = communicator.collective
        communicator.collective = lambda row, *args, **options: (
            calls.append(row.name) or collective(row, *args, **options)
        )
        zero.step()
        return calls

    assert run("threads", 2, body, True) == [["all_gather"]] * 2
    # The one large parameter goes by itself, the others together.
    assert run("threads", 2, body, False) == [["all_gather", "broadcast"]] * 2


# -- with a DistributedDataParallel


def uneven_training(as_views: bool, ddp_options: dict[str, Any]) -> tuple[list[torch.Tensor], list[float]]:
    """Ranks have 2, 4 and 6 samples, of which each makes a step."""
    model = DistributedDataParallel(
        copy.deepcopy(BRANCHES), bucket_cap_mb=0.0005, find_unused_parameters=True, **ddp_options
    )
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_views, lr=0.05, weight_decay=0.3
    )
    losses = []
    with Join([model, zero], divide_by_initial_world_size=False):
        for step in range(2 + 2 * dist.get_rank()):
            zero.zero_grad()
            loss = model(inputs(dist.get_rank(), step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            zero.step()
    return [parameter.detach() for parameter in model.parameters()], losses


class Branches(nn.Module):
    """One branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            self.never = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


BRANCHES = Branches()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_model_and_optimizer_join_together(kind: str, options: dict[str, bool]) -> None:
    """A rank without inputs updates its share by the others' gradients, as one optimizer would."""
    alone = copy.deepcopy(BRANCHES)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05, weight_decay=0.3)
    for step in range(6):
        optimizer.zero_grad()
        left = [rank for rank in range(3) if step < 2 + 2 * rank]
        for rank in left:
            (alone(inputs(rank, step)).square().mean() / len(left)).backward()
        optimizer.step()
    told = run(kind, 3, uneven_training, kind == "threads", options)
    for found, _ in told:
        close(found, list(alone.parameters()))
        assert same_bits(found, told[0][0])
    assert [len(losses) for _, losses in told] == [2, 4, 6]
