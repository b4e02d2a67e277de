"""A program of torch.distributed on hosts that are network namespaces, with and without the switch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from real_hosts import Network, enter, needs_hosts

import worlds
from torchestra.interop import autoload
from torchestra.launcher.main_script import run_script
from torchestra.launcher.spec import Script
from torchestra.store import Store

INTEROP = Path(__file__).parents[1] / "interop"
pytestmark = needs_hosts()


def run_unchanged(_: Store, rank: int, size: int, names: list[str], switched: bool, path: str) -> None:
    """Run the program on a rank, as torchrun would on its host: what it is told stands in the environment."""
    enter(names[rank])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="10.77.0.1", MASTER_PORT="29411")
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", TORCHESTRA_SECRET="a secret of these tests")
    sys.path.insert(0, str(INTEROP))
    if switched:
        autoload.turn_on_switch()
    run_script(Script(str(INTEROP / "unchanged_program.py"), (path,), False))


def test_an_unchanged_program_gives_the_same_losses_on_two_hosts(tmp_path: Path) -> None:
    """DDP, FSDP2, DCP, tensor parallel, a pipeline, objects and messages, by Gloo and by torchestra."""
    found = []
    network = Network(2)
    try:
        for switched in (False, True):
            path = tmp_path / f"{switched}.json"
            worlds.run("processes", 2, run_unchanged, network.hosts, switched, str(path), init=False)
            found.append(json.loads(path.read_text()))
    finally:
        network.close()
    by_gloo, by_torchestra = found
    assert by_gloo["ddp"][-1] < by_gloo["ddp"][0]
    assert by_torchestra.keys() == by_gloo.keys()
    for name, losses in by_gloo.items():
        torch.testing.assert_close(torch.tensor(by_torchestra[name]), torch.tensor(losses), msg=name)
