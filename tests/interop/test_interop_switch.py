"""Programs that say torch.distributed and "gloo" run on torchestra, unchanged, where the switch is on."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch_worlds
from tools.mpich_memory import mpich_memory_removed
from torch import distributed as dist
from torch.distributed.device_mesh import (  # held by others before the switch is on
    init_device_mesh,
    new_group,
)
from torch.distributed.distributed_c10d import _new_process_group_helper, _set_pg_timeout

import torchestra
import worlds
from ports import free_port
from torchestra.errors import InvalidArgumentError
from torchestra.interop import autoload, switch
from torchestra.interop.torch_distributed import TorchestraGroup, inner_group
from torchestra.launcher.main_script import run_script
from torchestra.launcher.spec import Script
from torchestra.monitor.doctor import examine
from torchestra.store import Store
from warm_programs import run_warm

HERE = Path(__file__).parent
PROGRAM = HERE / "unchanged_program.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": ":".join(map(str, (Path(torchestra.__file__).parents[1], HERE))),
    "OMP_NUM_THREADS": "1",
}


def run_unchanged(_: Store, rank: int, size: int, switched: bool, hosts: int, port: int, path: str) -> None:
    """Run the program as a launcher of torch's would: all that it is told stands in the environment."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.path.insert(0, str(HERE))
    torch_worlds.pretend_hosts(rank, size, hosts)
    if switched:
        autoload.turn_on_switch()
    run_script(Script(str(PROGRAM), (path,), False))


def test_a_program_gives_the_same_losses_with_and_without_the_switch(tmp_path: Path) -> None:
    """DDP, FSDP2, DCP, tensor parallel, a pipeline, objects and messages; on one host, and on two."""
    found = []
    for switched, hosts in ((False, 1), (True, 1), (True, 2)):
        path = tmp_path / "results.json"
        arguments = (switched, hosts, free_port(), str(path))
        worlds.run("processes", 2, run_unchanged, *arguments, init=False)
        found.append(json.loads(path.read_text()))
        path.unlink()
    by_gloo, *by_torchestra = found
    assert by_gloo["ddp"][-1] < by_gloo["ddp"][0]
    for each in by_torchestra:
        assert each.keys() == by_gloo.keys()
        for name, losses in by_gloo.items():
            torch.testing.assert_close(torch.tensor(each[name]), torch.tensor(losses), msg=name)


def what_names_say() -> dict[str, object]:
    group = dist.group.WORLD
    part = new_group([0, 1], backend="gloo")
    unnamed = dist.new_group([0])
    mesh = init_device_mesh("cpu", (2,)).get_group()
    dist.barrier()  # Gloo's ranks fail if another ends while they connect
    return {
        "backend": str(dist.get_backend()),
        "config": dist.get_backend_config(),
        "part": str(dist.get_backend(part)),
        "unnamed": str(dist.get_backend(unnamed)) if dist.get_rank() == 0 else str(unnamed),
        "class": isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo),
        "group": isinstance(group, dist.ProcessGroup),
        "options": group._get_backend(torch.device("cpu")).options.backend,
        "mesh": str(dist.get_backend(mesh)),
    }


def names_and_service() -> tuple[dict[str, object], bool]:
    return what_names_say(), isinstance(dist.group.WORLD, TorchestraGroup)


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", None])
def test_names_are_what_they_are_with_gloo(backend: str | None) -> None:
    ours = torch_worlds.run(2, names_and_service, backend=backend, switched=True)
    theirs = torch_worlds.run(2, names_and_service, backend=backend)
    for (named, is_ours), (expected, is_also_ours) in zip(ours, theirs, strict=True):
        assert is_ours
        assert not is_also_ours
        assert named == expected


def set_timeout(seconds: int) -> None:
    with warnings.catch_warnings():  # deprecated since torch 2.15, whose set_timeout() it calls
        warnings.simplefilter("ignore", FutureWarning)
        _set_pg_timeout(timedelta(seconds=seconds))


def ask_for_what_names_gloo() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=22))
        assert inner_group().timeout == timedelta(seconds=22)
    set_timeout(21)
    assert inner_group().timeout == timedelta(seconds=21)
    part = dist.split_group(None, [[0, 2], [1]], group_desc="even and odd")
    assert dist.get_process_group_ranks(part) == ([1] if dist.get_rank() == 1 else [0, 2])
    assert dist.get_backend(part) == dist.get_backend()
    again = dist.split_group(split_ranks=[[2, 1]])
    assert (again is None) == (dist.get_rank() == 0)
    tensor = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=part)
    assert tensor.tolist() == [1.0 if dist.get_rank() == 1 else 2.0] * 2
    if again is not None:
        dist.broadcast(tensor, src=1, group=again)
        assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no rank twice"):
        dist.split_group(split_ranks=[[0, 1], [1, 2]])


def shrink_and_go_on() -> None:
    other = dist.new_group([0, 1])
    del other
    worlds.leave_note(f"has the group {dist.get_rank()}")
    for rank in range(3):  # one that still makes it would be told that another shrinks
        worlds.await_note(f"has the group {rank}")
    if dist.get_rank() == 1:
        return
    numbers = [None, None]
    group = dist.shrink_group([1])
    assert group is dist.group.WORLD
    assert dist.get_world_size() == 2
    dist.all_gather_object(numbers, dist.get_rank())
    assert numbers == [0, 1]
    pair = dist.new_group([0, 1])  # of the name of the one before, with other ranks in it
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pair)
    assert tensor == 2
    part = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(tensor, group=part)
    assert tensor == 4


@pytest.mark.parametrize(("backend", "switched"), [("gloo", True), ("torchestra", False)])
def test_functions_that_look_for_gloo_serve_groups_of_torchestra(backend: str, switched: bool) -> None:
    torch_worlds.run(3, ask_for_what_names_gloo, backend=backend, switched=switched)


@pytest.mark.parametrize(("backend", "switched"), [("gloo", True), ("torchestra", False)])
def test_groups_are_shrunk(backend: str, switched: bool) -> None:
    if not hasattr(dist, "shrink_group"):
        pytest.skip("this torch has no shrink_group")
    torch_worlds.run(3, shrink_and_go_on, backend=backend, switched=switched)


def leave_gloo_alone() -> None:
    group = dist.group.WORLD
    assert type(group) is dist.ProcessGroup
    dist.monitored_barrier()
    set_timeout(22)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=22)
    try:
        part = dist.split_group(split_ranks=[[0, 1]])
    except RuntimeError as error:  # torch 2.15 splits Gloo's groups
        assert "No device associated" in str(error)  # noqa: PT017
    else:
        assert type(part) is dist.ProcessGroup
        dist.barrier()  # Gloo's ranks fail if another ends while they connect


def test_gloo_is_as_it_was_where_the_switch_is_off() -> None:
    torch_worlds.run(2, leave_gloo_alone, backend="gloo")


def use_the_helper_as_libraries_do() -> None:
    """Make a group beside the default group, as trainers of language models do for their samplers."""
    store = dist.PrefixStore("beside", dist.distributed_c10d._get_default_store())
    group, _ = _new_process_group_helper(
        2,
        dist.get_rank(),
        [],
        dist.Backend("gloo"),
        store,
        group_name="beside",
        timeout=timedelta(seconds=30),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2, 2]
    assert isinstance(group, TorchestraGroup)


def test_the_helper_that_libraries_import_makes_groups_of_torchestra() -> None:
    torch_worlds.run(2, use_the_helper_as_libraries_do, backend="gloo", switched=True)


@pytest.mark.parametrize(
    ("served", "told"),
    [("torchestra", "tensors of the CPU and of CUDA"), ("cpu:torchestra", "'cpu:torchestra'")],
)
def test_a_line_of_the_log_says_what_serves(caplog: pytest.LogCaptureFixture, served: str, told: str) -> None:
    class Group:
        def rank(self) -> int:
            return 0

        size = rank

    with caplog.at_level(logging.WARNING):
        switch._tell(Group(), served)
    assert "TORCHESTRA_FOR=gloo" in caplog.text
    assert told in caplog.text


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("gloo", "torchestra"),
        ("cuda:nccl,cpu:gloo", "cpu:torchestra,cuda:nccl"),
        ("cpu:gloo,cuda:gloo", "cpu:torchestra,cuda:torchestra"),
        ("mps:gloo", None),
        ("nccl", None),
        ("fake", None),
        ("torchestra", None),
    ],
)
def test_what_is_served_comes_first_and_the_rest_stays(asked: str, expected: str | None) -> None:
    assert switch.served_by_us(asked) == expected


def test_another_backend_than_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_FOR", "nccl")
    with pytest.raises(InvalidArgumentError, match="can serve programs for gloo"):
        autoload.autoload()
    assert any(result.found == "wrong" for result in examine() if result.subject == "torch.distributed")


def test_the_doctor_shows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def row() -> str:
        (result,) = [each for each in examine() if each.subject == "torch.distributed"]
        return f"{result.found}; {result.remark}"

    monkeypatch.delenv("TORCHESTRA_FOR", raising=False)
    assert "TORCHESTRA_FOR=gloo would" in row()
    monkeypatch.setenv("TORCHESTRA_FOR", "gloo")
    assert "served by torchestra" in row()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "python -m torchestra.interop" in row()


def test_the_doctor_tells_of_a_switch_with_which_torch_cannot_be_imported() -> None:
    command = [sys.executable, "-m", "torchestra", "doctor"]
    environment = {**ENVIRONMENT, "TORCHESTRA_FOR": "nccl"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert told.returncode == 1, told
    assert "TORCHESTRA_FOR='nccl': torchestra can serve programs for gloo" in told.stdout
    assert not told.stderr


SMALL = r"""
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
sys.stdout.write(f"{sys.argv[1:]} {type(dist.group.WORLD).__name__} {tensor.item()}\n")  # in one piece
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "torchestra.interop"],
        ["-m", "torchestra", "run", "-n", "2", "--as", "gloo"],
        ["mpiexec"],
    ],
)
def test_the_commands_turn_it_on(tmp_path: Path, command: list[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(SMALL)
    met = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    alone = command == ["-m", "torchestra.interop"]
    environment = {**ENVIRONMENT, **met, **({"RANK": "0", "WORLD_SIZE": "1"} if alone else {})}
    started = [sys.executable, *command]
    if command == ["mpiexec"]:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        if not mpiexec.exists():
            pytest.skip("there is no mpiexec beside this Python")
        started = [str(mpiexec), "-n", "2", sys.executable, "-m", "torchestra.interop"]
    run = run_warm if alone else subprocess.run  # the others turn it on where ranks load torch
    with mpich_memory_removed():
        ended = run(
            [*started, str(program), "--flag"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert ended.returncode == 0, ended.stderr
    expected = f"['--flag'] TorchestraGroup {1.0 if alone else 2.0}"
    assert ended.stdout.count(expected) == (1 if alone else 2), ended.stdout + ended.stderr
    assert ended.stderr.count('serves "gloo" here') == 1


@pytest.mark.parametrize("module", ["torchestra.interop", "torchestra.compat"])
def test_a_program_that_does_not_exist_is_told_of_in_a_line(module: str) -> None:
    command = [sys.executable, "-m", module, "no/such.py"]
    ended = run_warm(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.endswith("there is no file 'no/such.py'\n")
    assert "Traceback" not in ended.stderr


def call_what_has_no_effect() -> None:
    with pytest.raises(RuntimeError, match="missing implementation of enableCollectivesTiming"):
        dist.group.WORLD._enable_collectives_timing()
    dist.barrier()


def test_calls_that_would_have_no_effect_are_errors() -> None:
    torch_worlds.run(2, call_what_has_no_effect, backend="gloo", switched=True)
