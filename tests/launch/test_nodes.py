"""``torchestra run --nnodes``: several launchers, one job."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchestra.errors import InvalidArgumentError
from torchestra.launcher.nodes import Nodes, parse_rendezvous

SCRIPT = """
    import os, sys
    import torch
    import torchestra as dist

    dist.init_process_group()
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    hosts = dist.group.WORLD.communicator.hosts.members
    local = f"{os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
    print(f"{local}: {total.item()} {hosts}", flush=True)
    if sys.argv[1:] == ["fail"] and dist.get_rank() == 2:
        os._exit(7)
    dist.barrier()
    dist.destroy_process_group()
"""
LIMIT_S = 100


def run_nodes(script: Path, ranks: tuple[int, ...], *arguments: str) -> list[tuple[int, str, str]]:
    """One launcher for each node, all on this machine but told that they are not; how each ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    launchers = []
    for node, nproc in enumerate(ranks):
        command = [
            sys.executable,
            "-m",
            "torchestra",
            "run",
            "--nnodes",
            str(len(ranks)),
            "--node-rank",
            str(node),
        ]
        command += ["--rendezvous", place, "--nproc", str(nproc), str(script), *arguments]
        environment = {**os.environ, "TORCHESTRA_SECRET": "of this test", "TORCHESTRA_HOST_ID": f"node{node}"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        launchers.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        return [(*launcher.communicate(timeout=LIMIT_S), launcher.returncode) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_ranks_are_numbered_by_node_and_meet(script: Path) -> None:
    (first, _, code), (second, _, other_code) = run_nodes(script, (1, 2))
    assert (code, other_code) == (0, 0)
    assert first == "[rank 0] 0 of 1: 6 ((0,), (1, 2))\n"
    assert sorted(second.splitlines()) == [
        "[rank 1] 0 of 2: 6 ((0,), (1, 2))",
        "[rank 2] 1 of 2: 6 ((0,), (1, 2))",
    ]


def test_the_failure_of_one_node_ends_all_with_its_code(script: Path) -> None:
    (_, first, code), (_, second, other_code) = run_nodes(script, (1, 2), "fail")
    assert (code, other_code) == (7, 7)
    assert re.search(
        r"torchestra: ended because node 1 failed: rank 2 \(pid \d+\) failed: exit code 7", first
    )
    assert re.search(r"torchestra: rank 2 \(pid \d+\) failed: exit code 7", second)


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_SECRET", "a secret")
    with pytest.raises(InvalidArgumentError, match="--node-rank must be from 0 to 1, got 2"):
        Nodes(2, 2, "127.0.0.1:1", 1, 1)
    for text in ("node0", "node0:", ":29400", "node0:0", "node0:99999"):
        with pytest.raises(InvalidArgumentError, match="--rendezvous must be host:port"):
            parse_rendezvous(text)
    assert parse_rendezvous("[::1]:29400") == ("::1", 29400)
    monkeypatch.delenv("TORCHESTRA_SECRET")
    with pytest.raises(InvalidArgumentError, match="set TORCHESTRA_SECRET to the same random text"):
        Nodes(2, 0, "127.0.0.1:1", 1, 1)
