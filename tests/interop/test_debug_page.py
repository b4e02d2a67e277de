"""The page of torch's debug server that shows torchestra's operations, without the server around it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch_worlds import run

from torchestra.interop import debug_handlers

if importlib.util.find_spec("tabulate") is None or importlib.util.find_spec("jinja2") is None:
    pytest.skip("torch's debug server needs Jinja2 and tabulate", allow_module_level=True)


def see_the_pages() -> dict[str, dict[str, Any]]:
    dist.all_reduce(torch.ones(7))
    dist.barrier()
    shown = {}
    if dist.get_rank() == 0:
        page = pickle.loads(pickle.dumps(debug_handlers()[-1]))  # as it comes to the server's process
        request = SimpleNamespace(frontend=SimpleNamespace(render_template=lambda _, **values: values))
        shown = {route.path: route.handler(request) for route in page.routes()}
        shown["dump"] = {"text": page.dump()}
    dist.barrier()
    return {path: {**values, "pid": os.getpid()} for path, values in shown.items()}


def has_pages() -> bool:
    """Return whether torch's debug server takes pages of others, as it does not in torch 2.10.

    Not to be called when tests are collected: a process that has imported nothing but torch's part of it may
    end by a fatal error, see below.
    """
    from torch.distributed.debug import start_debug_server

    pages = "handlers" in inspect.signature(start_debug_server).parameters
    if pages:
        importlib.import_module("torchestra.interop.torch_distributed.debug_page")
    return pages


ENDS = """
from torchestra.interop.torch_distributed import debug_page
import torch.distributed.debug._handlers as handlers
vars(handlers).clear()
"""


def test_a_process_with_torchs_handlers_ends_well_whatever_else_refers_to_them() -> None:
    """torch's table of them is destroyed after the interpreter, and would release the functions then."""
    if not has_pages():
        pytest.skip("torch's debug server takes no pages")
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_torchs_debug_server_shows_our_operations_on_a_page_that_it_is_given() -> None:
    if not has_pages():
        with pytest.raises(ImportError, match=r"debug server of torch .* takes no pages"):
            debug_handlers()
        return
    shown, nothing = run(2, see_the_pages)
    assert not nothing
    tables = shown["/torchestra"]
    assert "PARTIAL DATA" not in str(tables["fetch_summary"])
    assert tables["groups"].count("<tr>") == 2, "a header and the default group"
    assert tables["memberships"].count("<tr>") == 3, "a header and two ranks"
    assert any("all_reduce" in row and "[[7]]" in row for row in tables["collectives"].split("<tr>"))
    addresses, answers = shown["/torchestra_json"]["addrs"], shown["/torchestra_json"]["resps"]
    assert addresses[0] == f"pid {tables['pid']}"
    for text in [answer.text for answer in answers] + shown["dump"]["text"].splitlines():
        entries = json.loads(text)["entries"]
        assert ["gloo:all_reduce", [[7]], "completed"] in [
            [entry["profiling_name"], entry["input_sizes"], entry["state"]] for entry in entries
        ]
    assert len(answers) == len(shown["dump"]["text"].splitlines()) == 2
