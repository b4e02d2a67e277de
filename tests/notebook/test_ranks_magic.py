"""Ranks in notebooks: the magics in IPython's shell, and in a kernel of Jupyter."""

from __future__ import annotations

import importlib.util
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchestra.system.temporary_folder import temporary_folder
from warm_programs import NestedWarm, run_warm

pytest.importorskip("IPython", reason="IPython is not installed")

# Runs each cell, and says whether it went well. SIGINT comes when a rank has said that it is ready.
SHELL = """
import os, signal, sys, threading, time, warnings
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config, colors="nocolor")

def interrupt_when(path):
    def wait():
        while not os.path.exists(path):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=wait, daemon=True).start()

for number, cell in enumerate(CELLS):
    if "READY" in cell:
        path = os.path.abspath(f"ready{number}")
        cell = cell.replace("READY", repr(path))
        interrupt_when(path)
    print(f"=== {number}", flush=True)
    ended = shell.run_cell(cell).success
    sys.stdout.flush()
    sys.stderr.flush()
    print("=== ok" if ended else "=== failed", flush=True)
"""


def run_cells(directory: os.PathLike[str], *cells: str) -> list[tuple[bool, str]]:
    """Run cells in a shell; for each whether it went well, and what was shown."""
    program = f"CELLS = {cells!r}\n{SHELL}"
    done = run_warm(
        [sys.executable, "-c", program],
        cwd=directory,
        env={**os.environ, "IPYTHONDIR": os.fspath(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        kind=NestedWarm,
    )
    assert done.returncode == 0, done.stdout
    shown = [part.partition("\n")[2] for part in done.stdout.split("=== ")]
    ends = [part.partition("\n")[0] for part in done.stdout.split("=== ")]
    return [(ends[2 * n + 2] == "ok", shown[2 * n + 1]) for n in range(len(cells))]


def test_cells_on_ranks(tmp_path, nothing_left: Callable[[], None]) -> None:
    """One shell for all: what it takes to start one costs more than the cells."""
    cells = run_cells(
        tmp_path,
        "%load_ext torchestra.notebook",
        "%%ranks\n1",
        "%%ranks 3\nimport os, torch, torchestra as dist\nx = torch.full((2,), float(dist.get_rank()))\n"
        "dist.all_reduce(x)\nx",
        "%%ranks\nprint('still', x.tolist())\nundefined",
        "%%ranks --on 1\nx + 1",
        "%%ranks\nif dist.get_rank() == 1:\n    raise ValueError('one only')\ndist.barrier()",
        "%%ranks\ndist.all_reduce(x)\nx.tolist()",
        "%%ranks\ndist.barrier()\nif dist.get_rank() == 0:\n    open(READY, 'w')\nelse:\n    dist.barrier()\n"
        "import threading\nthreading.Event().wait()",
        "%%ranks\ndist.all_reduce(x)\nx.tolist()",
        "%%ranks 2\n1",
        "%%ranks\nif dist.get_rank() == 2:\n    os._exit(3)\ndist.barrier()",
        "%%ranks --on 0\nx.tolist()",
        "%ranks_stop",
        "%%ranks 2 --world torch\nimport torch, torch.distributed as dist\nx = torch.ones(2)\n"
        "dist.all_reduce(x)\n(x.tolist(), dist.get_backend())",
        "%%ranks\nif dist.get_rank() == 1:\n    raise ValueError('one only')\ndist.barrier()",
        "%%ranks\ndist.all_reduce(x)\nx.tolist()",
        "%ranks_stop",
        "%%ranks 2 --no-init\nimport torchestra as dist\n"
        "assert not dist.is_initialized()\ndist.init_process_group()\ndist.get_world_size()",
        # Rank 1 is stopped, so it begins the cell only after the interrupt.
        "%%ranks\nimport os, signal, threading\npids = [0, 0]\ndist.all_gather_object(pids, os.getpid())",
        "%%ranks --on 0\nos.kill(pids[1], signal.SIGSTOP)",
        "%%ranks\nif dist.get_rank() == 0:\n    open(READY, 'w')\ntry:\n    threading.Event().wait()\n"
        "finally:\n    os.kill(pids[1], signal.SIGCONT)",
        "%%ranks\nlen(pids)",
    )
    went_well = [well for well, _ in cells]
    shown = [text for _, text in cells]
    # fmt: off
    assert went_well == [True, False, True, False, True, False, True, False, True, False, False,
                         True, True, True, False, True, True, True, True, True, False, True], shown
    # fmt: on
    assert "say how many" in shown[1]
    assert sorted(shown[2].splitlines()) == [f"[rank {rank}] tensor([3., 3.])" for rank in range(3)]
    assert "[rank 1] still [3.0, 3.0]" in shown[3]
    assert "[ranks 0-2] NameError: name 'undefined' is not defined" in shown[3]
    assert shown[4] == "[rank 1] tensor([4., 4.])\n"
    assert "[rank 0] was released: " in shown[5]
    assert shown[5].rstrip().endswith("[rank 1] ValueError: one only"), "the cause comes last"
    assert "have a new default group" in shown[6]
    assert "[rank 2] [9.0, 9.0]" in shown[6]
    assert (
        shown[7] == "KeyboardInterrupt: the cell was interrupted on the ranks, which keep their variables\n"
    )
    assert "[rank 0] [27.0, 27.0]" in shown[8]
    assert "there are 3 ranks" in shown[9]
    assert "rank 2 of 3 has died: exit code 3" in shown[10]
    assert "[rank 0] [27.0, 27.0]" in shown[11]
    assert "[rank 1] ([2.0, 2.0], 'gloo')" in shown[13]
    assert "[rank 1] ValueError: one only" in shown[14]
    assert "[rank 0] [4.0, 4.0]" in shown[15]
    assert "[rank 0] 2" in shown[17]
    assert "interrupted on the ranks, which keep their variables" in shown[20]
    assert "[rank 1] 2" in shown[21]
    assert "src/torchestra" not in "".join(shown), "torchestra's own frames"
    nothing_left()


class Kernel:
    """A kernel of Jupyter, and what it shows."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.client = client

    def run(self, source: str, interrupt_at: str = "") -> dict[str, str]:
        """Run a cell to its end, and interrupt it when it has shown some text; what it showed, by stream."""
        request = self.client.execute(source)
        shown = {"stdout": "", "stderr": "", "error": "", "result": ""}
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown[content["name"]] += re.sub("\x1b\\[[0-9;]*m", "", content["text"])
                if interrupt_at and interrupt_at in shown["stdout"]:
                    interrupt_at = ""
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                shown["error"] += "\n".join(content["traceback"]) + content["ename"]
            elif message["msg_type"] == "execute_result":
                shown["result"] += content["data"]["text/plain"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return shown
        raise AssertionError(f"the cell did not end: {shown}")

    def wait_for_view(self, kind: str, *texts: str) -> None:
        """Wait until %ranks_top has shown all these texts, in messages of one kind."""
        awaited, deadline = set(texts), time.monotonic() + 60
        while awaited and time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["msg_type"] == kind:
                shown = str(message["content"]["data"])
                awaited = {text for text in awaited if text not in shown}
        assert not awaited, f"%ranks_top did not show {awaited}"


def see_the_live_view(kernel: Kernel) -> None:
    """Have %ranks_top show the ranks as text, and as a widget where the tests have ipywidgets."""
    kernel.run("import threading\nsys.modules['ipywidgets'] = None")
    assert "ipywidgets is not installed" in kernel.run("%ranks_top")["stdout"]
    kernel.wait_for_view("update_display_data", "group 'default'", "barrier() done")
    assert kernel.run("%ranks_top")["stdout"] == "", "it is said once"
    if importlib.util.find_spec("ipywidgets") is not None:
        kernel.run("del sys.modules['ipywidgets']\n%ranks_top")
        kernel.wait_for_view("comm_msg", "group &#x27;default&#x27;", "rank 0 (pid ", "rank 1 (pid ")
    assert "takes no argument but off" in kernel.run("%ranks_top on")["stderr"]
    kernel.run("%ranks_top off")
    names = kernel.run("[thread.name for thread in threading.enumerate()]")["result"]
    assert "ranks_top" not in names


def test_in_a_kernel_of_jupyter(tmp_path, monkeypatch, nothing_left: Callable[[], None]) -> None:
    """Its output goes to the cell by messages, and an interrupt comes as a signal to the kernel."""
    pytest.importorskip("ipykernel", reason="no kernel: ipykernel is not installed")
    manager_of = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    manager, client = manager_of.start_new_kernel(kernel_name="python3", startup_timeout=90)
    try:
        kernel = Kernel(manager, client)
        kernel.run("import os, sys, time, torchestra\ndef f(n):\n    print('out', n)\n"
                   "    print('err', n, file=sys.stderr)\n    return os.environ['RANK']")  # fmt: skip
        launched = kernel.run("torchestra.launch(f, 2, 5)")
        assert launched["result"] == "['0', '1']"
        assert sorted(launched["stdout"].splitlines()) == ["[rank 0] out 5", "[rank 1] out 5"]
        assert sorted(launched["stderr"].splitlines()) == ["[rank 0] err 5", "[rank 1] err 5"]
        kernel.run("def wait():\n    print('waiting')\n    time.sleep(100)")
        interrupted = kernel.run("torchestra.launch(wait, 1)", interrupt_at="waiting")
        assert interrupted["error"].endswith("KeyboardInterrupt")
        again = kernel.run("torchestra.launch(f, 1, 6)")
        assert again["stdout"] == "out 6\n"
        kernel.run("%load_ext torchestra.notebook")
        first = kernel.run("%%ranks 2\nimport torchestra as dist\ndist.barrier()\nx = dist.get_rank()\nx")
        second = kernel.run("%%ranks\nx + 1")
        assert sorted(first["stdout"].splitlines()) == ["[rank 0] 0", "[rank 1] 1"], first
        assert sorted(second["stdout"].splitlines()) == ["[rank 0] 1", "[rank 1] 2"], second
        see_the_live_view(kernel)
        kernel.run("%%ranks\nimport time\nprint('waiting')\ntime.sleep(100)", interrupt_at="waiting")
        third = kernel.run("%%ranks\nx + 1")
        assert "[rank 1] 2" in third["stdout"], third
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)  # kills it
    nothing_left()
    with temporary_folder("torchestra-ranks-") as folder:  # as the next session does
        assert list(Path(tempfile.gettempdir()).glob("torchestra-ranks-*")) == [Path(folder)]
