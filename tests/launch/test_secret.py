"""The secret that ``torchestra run`` gives to each job."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchestra.engine.membership.agreement import Ballot, State
from torchestra.launcher.spec import Call, JobSpec, MainModule
from torchestra.rendezvous.over_mpi import _StoreAddress
from torchestra.rpc import RpcBackendOptions
from torchestra.testing.item_runner import ItemRequest

RANK = """
    import os
    from torchestra import TCPStore
    from torchestra.errors import DistNetworkError

    secret = os.environ["TORCHESTRA_SECRET"]
    seen = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                seen.append(file.read())
        except OSError:
            pass
    host, port = os.environ["TORCHESTRA_STORE"].split(":")
    try:
        TCPStore(host, int(port), timeout=20, secret="another job's")
        entered = True
    except DistNetworkError as error:
        entered = "different secrets" not in str(error)
    TCPStore(host, int(port), timeout=20).set("mine", "1")
    print(secret, len(seen) > 1 and not any(secret in line for line in seen), entered)
"""

TELLTALE = """
    import logging, os, sys, traceback
    import torch
    import torchestra as dist
    from torchestra import TCPStore, cli
    from torchestra.store import TCPStoreServer
    from torchestra.transport.endpoint import read_endpoint

    logging.basicConfig(level=logging.DEBUG)
    dist.init_process_group()
    dist.all_reduce(torch.ones(3))
    secret = os.environ["TORCHESTRA_SECRET"].encode()
    if dist.get_rank() == 0:
        cli.main(["doctor"])
        cli.main(["top", "--once", "--job", str(os.getpid())])
        cli.main(["report", "--out", sys.argv[1], "--job", str(os.getpid())])
        with TCPStoreServer() as server:
            for other in ("no", None):
                try:
                    TCPStore(server.host, server.port, secret=other)
                except Exception:
                    traceback.print_exc()
                os.environ.pop("TORCHESTRA_SECRET", None)
        try:
            read_endpoint(bytes(100), secret, "there", "rank 1")
        except Exception:
            traceback.print_exc()
    dist.barrier()
    raise RuntimeError("on purpose")
"""


def words(start, **options: object) -> list[list[str]]:  # type: ignore[no-untyped-def]
    code, out, err = start(RANK, 2, **options).finish()
    assert code == 0, err
    return [line.partition("] ")[2].split() for line in out.splitlines()]


def test_each_job_has_a_secret_of_its_own_that_no_command_line_shows(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)
    jobs = [words(start) for _ in range(2)]
    for ranks in jobs:
        assert len(ranks) == 2
        assert ranks[0] == ranks[1]
        secret, hidden, entered = ranks[0]
        assert len(bytes.fromhex(secret)) >= 16
        assert (hidden, entered) == ("True", "False")
    assert jobs[0] != jobs[1]


def test_a_secret_that_is_set_is_kept(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_SECRET", "the-users-own")
    assert words(start) == [["the-users-own", "True", "False"]] * 2


def test_nothing_that_is_told_shows_it(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor, top and a report, whatever is logged, and tracebacks of those who are refused."""
    marker = "c0ffee" * 6
    monkeypatch.setenv("TORCHESTRA_SECRET", marker)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    code, out, err = start(TELLTALE, 2, str(tmp_path / "report.json")).finish()
    told = out + err
    assert code != 0
    assert f"TORCHESTRA_SECRET is set, {len(marker)} bytes" in told
    assert "all_reduce" in (tmp_path / "report.json").read_text()
    for said in ("different secrets", "another secret", "process has none", "does not know", "on purpose"):
        assert said in told, told
    for text in (told, (tmp_path / "report.json").read_text()):
        assert marker not in text
        assert marker.encode().hex() not in text


def test_what_holds_the_secret_does_not_show_it() -> None:
    """In a log, a traceback with the values of variables, or a debugger's list of them."""
    call = Call(b"the secret", MainModule())
    spec = JobSpec(2, call, {"TORCHESTRA_SECRET": "the secret"}, "/")
    store_address = _StoreAddress(["10.0.0.1"], 1, "the secret")
    options = RpcBackendOptions(secret="the secret")
    request = ItemRequest("", 2, "", 1.0, True, (), "/", {}, {"TORCHESTRA_SECRET": "the secret"}, False, None)
    decision = Ballot(0, 1, State.PROPOSED, 0, (0, 1), b"the secret")
    for each in (spec, call, store_address, options, request, decision):
        assert "the secret" not in f"{each!r} {each}"
