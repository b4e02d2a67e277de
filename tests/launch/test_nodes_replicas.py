"""``torchestra run --nnodes 3``: the launchers serve the job's store together, and node 0 may be lost."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_nodes import ended, free_address, nodes_running

from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.launcher import nodes
from torchestra.launcher.nodes import Nodes
from torchestra.launcher.store_replica import replica_count
from torchestra.store.base import pauses

SCRIPT = """
    import os, sys
    import torch
    import torchestra as dist

    dist.init_process_group()
    rank = dist.get_rank()
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            open(os.path.join(sys.argv[1], f"met-{rank}"), "w").close()
    except dist.GroupAbortedError:
        world = dist.group.WORLD.shrink()
    pair = dist.new_group([0, 1])
    dist.barrier(group=pair)
    print(world.previous_ranks, flush=True)
    dist.destroy_process_group()
"""
LONG = 60.0


def test_the_loss_of_node_0_and_its_launcher_ends_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "4")
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    options = ("--max-failures", "1")
    with nodes_running(free_address(), script, (1, 1, 1), str(tmp_path), options=options) as launchers:
        met = [tmp_path / f"met-{rank}" for rank in range(3)]
        for _ in pauses(LONG):
            if all(each.exists() for each in met) or any(each.poll() is not None for each in launchers):
                break
        launchers[0].kill()
        for number, launcher in enumerate(launchers[1:], 1):
            out, err, code = ended(launcher)
            assert (code, out) == (0, f"[rank {number}] (1, 2)\n"), err


@pytest.mark.parametrize("spare_comes", [True, False])
def test_a_spare_host_serves_a_replica_for_two_nodes_if_it_is_there(
    spare_comes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHESTRA_SECRET", "of this test")
    monkeypatch.setattr(nodes, "SPARE_SECONDS", LONG if spare_comes else 0.1)
    rendezvous = free_address()
    with ThreadPoolExecutor(3) as threads:
        began = [
            threads.submit(Nodes, 2, node, rendezvous, 1, 1, 1, 1) for node in range(3 if spare_comes else 2)
        ]
        first, second = (each.result(LONG) for each in began[:2])
        store = first.store_variables()["TORCHESTRA_STORE"]
        assert second.store_variables() == {"TORCHESTRA_STORE": store}
        ending = [threads.submit(each.close) for each in (first, second)]
        if spare_comes:
            assert began[2].result(LONG).node_rank is None, "the job has ended"
            began[2].result().close()
        for each in ending:
            each.result(LONG)
    assert store.count(",") == 2 if spare_comes else store == rendezvous
    assert ("no spare host has come" in capsys.readouterr().err) is not spare_comes


@pytest.mark.parametrize(("nnodes", "count"), [(1, 0), (2, 0), (3, 3), (4, 3), (5, 5), (6, 5), (100, 5)])
def test_the_number_of_replicas_is_odd_and_none_where_no_loss_could_be_borne(nnodes: int, count: int) -> None:
    assert replica_count(nnodes) == count
