"""Test what is said about ranks on Ray before there is a cluster; Ray need not be installed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import torchestra as dist
from ports import free_port
from torchestra.cli import main
from torchestra.errors import DistError, InvalidArgumentError, NotReadyError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpus": -1}, "num_cpus must be 0 or more, got -1"),
        ({"num_cpus": float("inf")}, "num_cpus must be 0 or more, got inf"),
        ({"num_gpus": 0.5}, "`num_gpus` must be an int, got 0.5"),
        ({"num_cpus": 0}, "a rank must take something"),
        (
            {"strategy": "pack"},
            "`strategy` must be 'PACK' or .* or 'STRICT_SPREAD', got 'pack'",
        ),
        ({"placement_timeout": "soon"}, "timeout"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgumentError, TypeError), match=message):
        dist.RayOptions(**options)


def test_the_cluster_is_named_by_ray_or_by_options() -> None:
    with pytest.raises(InvalidArgumentError, match="`on` must be 'ray' or a RayOptions or None, got 'slurm'"):
        dist.launch(print, 2, on="slurm")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="ranks on Ray are processes, got kind='threads'"):
        dist.launch(print, 2, on="ray", kind="threads")
    with pytest.raises(InvalidArgumentError, match="nproc must be a positive int or 'auto', got 0"):
        dist.launch(print, 0, on="ray")


def test_where_ray_is_missing_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotReadyError, match=r"not installed .*: pip install 'torchestra\[ray\]'"):
        dist.launch(len, 2, on="ray")  # not print: where a test before has imported Ray, that is Ray's
    script = tmp_path / "job.py"
    script.touch()
    assert main(["run", "--on", "ray", str(script)]) == 1
    assert "pip install 'torchestra[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_before_ray_tries_it(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Ray would try it for half a minute, or for minutes."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(DistError, match=rf"no connection to a Ray cluster at {address}: \[Errno"):
        dist.launch(print, 2, on=dist.RayOptions(address=address))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "ray", "--nnodes", "2", "--rendezvous", "a:1"), "with --on ray, Ray chooses the nodes"),
        (("--num-cpus", "2"), "--num-cpus is for --on ray"),
        (("--env", "A=b"), "--env is for --on ray"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments, __file__]) == 2
    assert message in capsys.readouterr().err


def test_ray_is_imported_only_when_it_is_asked_for() -> None:
    program = """
import sys
import torchestra, torchestra.launcher, torchestra.launcher.command
torchestra.RayOptions()
torchestra.launch(int, 1, kind="threads")
assert "ray" not in sys.modules and "torchestra.launcher.on_ray.placement" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
