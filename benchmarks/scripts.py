"""Parts of the benchmark that are a script of their own, run by torchestra's launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import torchestra_environment
from benchmarks.startup import end_launcher
from benchmarks.worker_processes import last_line

__all__ = ["run_script"]

_LIMIT_SECONDS = 300.0
_SCRIPTS = Path(__file__).resolve().parent / "ranks"


def run_script(script: str, world: int, *arguments: object) -> dict[str, Any]:
    """Run a script on ranks, and return what they have written into found.json.

    Args:
        script: a file of ``ranks/``; it finds a directory in TORCHESTRA_BENCH_DIRECTORY.
        world: how many ranks.
        arguments: for the script.

    Raises:
        RuntimeError: a rank failed, or they took more than five minutes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="torchestra-bench-") as directory,
        tempfile.TemporaryFile() as output,
    ):
        command = [sys.executable, "-m", "torchestra", "run", f"--nproc={world}", str(_SCRIPTS / script)]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=torchestra_environment({"TORCHESTRA_BENCH_DIRECTORY": directory}),
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"did not end within {_LIMIT_SECONDS:.0f} s") from None
        finally:
            end_launcher(process)
        if code != 0:
            raise RuntimeError(f"exit code {code}: {last_line(output)}")
        found: dict[str, Any] = json.loads((Path(directory) / "found.json").read_text())
        return found
