"""Modules on other workers that are called like modules here."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch

import rpc_workers
import worlds
from torchestra import autograd, rpc
from torchestra.nn import RemoteDevice, RemoteModule
from torchestra.nn.remote_module import _make_module
from torchestra.optim import DistributedOptimizer


class Affine(torch.nn.Module):
    def __init__(self, scale: float, shift: float = 0.0) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))
        self.inner = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(shift))])

    def forward(self, inputs: torch.Tensor, times: int = 1) -> tuple[torch.Tensor, str]:
        return inputs * self.scale * times + self.inner[0], rpc.get_worker_info().name


def no_module() -> int:
    return 3


def is_training(rref: rpc.RRef) -> bool:
    return rref.local_value().training


def call_it(module: RemoteModule, *args: Any) -> Any:
    return module(*args), module.forward(*args), module.forward_async(*args).wait()


def as_attributes(module: RemoteModule) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (str, bool))}


def share(rref: rpc.RRef, on: str) -> RemoteModule:
    return RemoteModule.init_from_module_rref(on, rref)


def use_in_every_way() -> None:
    for place in ("worker1/cpu", "worker1", "rank:1/cpu", "rank:1"):
        module = RemoteModule(place, Affine, (2.0,), {"shift": 1.0})
        value, name = module(torch.ones(2), times=3)
        assert (value.tolist(), name) == ([7, 7], "worker1")
        assert module.forward_async(torch.ones(1)).wait()[0].item() == 3
        assert module.device == "cpu"
    here = RemoteModule("cpu", Affine, (2.0,))
    assert here(torch.ones(1))[1] == "worker0"
    rref = module.get_module_rref()
    assert rref is module.module_rref
    assert rref.owner_name() == "worker1"
    assert len(module.remote_parameters()) == 2
    assert [each.to_here().item() for each in module.remote_parameters(recurse=False)] == [2]
    assert all(each.owner_name() == "worker1" for each in module.remote_parameters())
    for mode in (True, False):
        assert module.train(mode) is module
        assert rpc.rpc_sync("worker1", is_training, (rref,)) is mode
    module.train()
    assert module.eval() is module
    assert not rpc.rpc_sync("worker1", is_training, (rref,))
    assert "worker1" in repr(module) or "rank" in repr(module)
    everybody = torch.nn.Sequential(RemoteModule("worker1", torch.nn.Identity), torch.nn.ReLU())
    assert everybody(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    everybody.eval()
    assert not rpc.rpc_sync("worker1", is_training, (everybody[0].module_rref,))


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_every_way_to_use_one(kind: str) -> None:
    rpc_workers.first(kind, 2, use_in_every_way)


def pass_it_on() -> None:
    module = RemoteModule("worker1", Affine, (2.0,))
    module.note = "stays here"  # type: ignore[assignment]
    for value, name in rpc.rpc_sync("worker2", call_it, (module, torch.ones(1))):
        assert (value.item(), name) == (2, "worker1")
    assert rpc.rpc_sync("worker2", as_attributes, (module,)) == {
        "on": "worker1",
        "device": "cpu",
        "is_device_map_set": False,
        "is_scriptable": False,
    }
    again = rpc.rpc_sync("worker2", share, (module.module_rref, "worker1"))
    assert again(torch.ones(1))[1] == "worker1"
    for way in (pickle.dumps, copy.deepcopy, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
            way(module)


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_it_can_be_passed_on_in_calls_only(kind: str) -> None:
    rpc_workers.first(kind, 3, pass_it_on)


def use_wrongly() -> None:
    with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of"):
        RemoteModule("worker1", no_module).forward()
    with pytest.raises(RuntimeError, match="could not find destination"):
        RemoteModule("nobody/cpu", torch.nn.Identity)
    with pytest.raises(ValueError, match="TorchScript"):
        RemoteModule("worker1", torch.nn.Identity, _module_interface_cls=object)
    module = RemoteModule("worker1", torch.nn.Identity)
    calls: dict[str, tuple[Any, ...]] = {
        "register_buffer": ("b", torch.ones(1)),
        "register_parameter": ("p", None),
        "add_module": ("m", None),
        "apply": (print,),
        "to": ("cpu",),
        "type": (torch.float64,),
        "load_state_dict": ({},),
        "register_forward_hook": (print,),
        "register_forward_pre_hook": (print,),
        "register_backward_hook": (print,),
    }
    without = (
        "cuda cpu float double half bfloat16 state_dict named_parameters buffers named_buffers children"
        " named_children modules named_modules requires_grad_ zero_grad share_memory extra_repr"
    )
    for name in (*calls, *without.split()):
        with pytest.raises(ValueError, match=rf"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)(*calls.get(name, ()))
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()


def test_what_it_cannot_do_is_refused() -> None:
    rpc_workers.first("threads", 2, use_wrongly)


def test_without_workers_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="only works in RPC"):
        RemoteModule("worker1", torch.nn.Identity)


def train_it() -> None:
    module = RemoteModule("worker1", torch.nn.Linear, (3, 1))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    inputs = torch.eye(3)
    losses = []
    for _ in range(30):
        with autograd.context() as context_id:
            loss = ((module(inputs) - 1) ** 2).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_it_is_trained_in_contexts(kind: str) -> None:
    rpc_workers.first(kind, 2, train_it)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer0/cpu", ("trainer0", None, "cpu")),
        ("trainer0", ("trainer0", None, "cpu")),
        ("rank:3/cuda:1", (None, 3, "cuda:1")),
        ("rank:3", (None, 3, "cpu")),
        ("cuda:1", (None, None, "cuda:1")),
    ],
)
def test_devices_are_told_with_their_worker(text: str, told: tuple[Any, ...]) -> None:
    place = RemoteDevice.parse(text)
    assert (place.worker, place.rank, str(place.device)) == told
    assert RemoteDevice.parse(str(place)) == place


@pytest.mark.parametrize("text", ["/cpu", "a/b/c", "rank:x/cpu", "a:b:c/cpu", "rank:1/cpu/0"])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"Could not parse remote_device|device"):
        RemoteDevice.parse(text)


@torch.jit.interface
class Scaling:
    def forward(self, inputs: torch.Tensor, times: int = 2) -> tuple[torch.Tensor, str]:
        pass


@torch.jit.interface
class ScalingElsewhere:
    def forward(self, inputs: torch.Tensor, times: int = 2) -> tuple[torch.Tensor, str]:
        pass

    def forward_async(
        self, inputs: torch.Tensor, times: int = 2
    ) -> torch.jit.Future[tuple[torch.Tensor, str]]:
        pass


class Scaled(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, inputs: torch.Tensor, times: int = 2) -> tuple[torch.Tensor, str]:
        return inputs * self.scale * times, "scaled"


@torch.jit.script
def call_both_ways(module: ScalingElsewhere, inputs: torch.Tensor) -> tuple[torch.Tensor, str]:
    begun = module.forward_async(inputs, 3)
    own, _ = module.forward(inputs, 2)
    value, word = begun.wait()
    return own + value, word


def use_from_scripts() -> None:
    modules = [
        RemoteModule("worker1", Scaled, (scale,), _module_interface_cls=Scaling) for scale in (1.0, 10.0)
    ]
    modules.append(
        RemoteModule.init_from_module_rref("worker1", modules[0].module_rref, _module_interface_cls=Scaling)
    )
    scripted = [torch.jit.script(module) for module in modules]
    assert modules[0].is_scriptable
    for module, scale in zip([*modules, *scripted], (1, 10, 1) * 2, strict=True):
        assert module(torch.ones(1), 3)[0].item() == 3 * scale
        value, word = module.forward_async(torch.ones(1)).wait()
        assert (value.item(), word) == (2 * scale, "scaled")
    del modules, module
    value, word = call_both_ways(scripted[1], torch.ones(2))
    assert (value.tolist(), word) == ([50.0, 50.0], "scaled")
    with autograd.context() as context:
        inputs = torch.ones(1, requires_grad=True)
        autograd.backward(context, [call_both_ways(scripted[1], inputs)[0].sum()])
        assert autograd.get_gradients(context)[inputs].item() == 50
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(scripted[0], io.BytesIO())
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supported"):
        rpc.rpc_sync("worker1", as_attributes, (scripted[0],))
    with pytest.raises(ValueError, match=r"decorated by @torch\.jit\.interface"):
        RemoteModule("worker1", Scaled, (1.0,), _module_interface_cls=Scaled)


def test_a_module_of_an_interface_can_be_called_by_scripts() -> None:
    rpc_workers.first("threads", 2, use_from_scripts)


def test_modules_that_are_made_at_once_are_compiled_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.jit.script adds the methods of a class to a type that all threads share."""
    both, met = threading.Barrier(2), []

    def script(module: torch.nn.Module) -> torch.nn.Module:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(both.wait(0.2))
        return module

    monkeypatch.setattr(torch.jit, "script", script)
    made = [threading.Thread(target=_make_module, args=(Scaled, (1.0,), {}, "cpu", True)) for _ in range(2)]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join()
    assert not met
