"""Meeting with a secret and without: who can, and what those are told who cannot."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ports import free_port
from torchestra.errors import DistNetworkError, InvalidArgumentError, StoreTimeoutError
from torchestra.rendezvous import Rendezvous, over_mpi, rendezvous
from torchestra.store import TCPStore, TCPStoreServer
from torchestra.store.tcp import shared_server

LONG = 60.0
ELSEWHERE = "198.51.100.1"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = ("OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC_", "TORCHESTRA_", "MASTER_", "LOCAL_")
    for name in list(os.environ):
        if name.startswith(starts) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def port() -> int:
    return free_port()


def test_ranks_meet_by_a_secret_given_as_argument(port: int) -> None:
    def meet(rank: int) -> Rendezvous:
        return rendezvous(f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=LONG, secret="ours")

    with ThreadPoolExecutor(2) as threads:
        met = list(threads.map(meet, range(2)))
    assert [found.store.secret for found in met] == [b"ours"] * 2
    with pytest.raises(DistNetworkError, match="the server has a secret and this process has none"):
        TCPStore("127.0.0.1", port)
    with pytest.raises(DistNetworkError, match="different secrets"):
        rendezvous(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=LONG, secret="another job's")


def test_the_argument_is_the_ranks_secret_also_where_the_store_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher's store keeps the launcher's; a file has none of its own."""
    monkeypatch.setenv("TORCHESTRA_SECRET", "the launcher's")
    with TCPStoreServer() as server:
        monkeypatch.setenv("TORCHESTRA_STORE", f"{server.host}:{server.port}")
        met = rendezvous(rank=0, world_size=1, timeout=LONG, secret="ours")
        assert met.store.secret == b"ours"
        assert rendezvous(rank=0, world_size=1, timeout=LONG).store.secret == b"the launcher's"
    met = rendezvous((tmp_path / "f").as_uri(), rank=0, world_size=1, timeout=LONG, secret="ours")
    assert met.store.secret == b"ours"


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_on_several_hosts_are_told_what_to_set(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, also rank 0, which would listen for its own host only and wait in vain."""
    variables = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ELSEWHERE, "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = r"several hosts \(2 of 4 on this one\) and have no secret .*; set TORCHESTRA_SECRET to the same"
    with pytest.raises(InvalidArgumentError, match=words):
        rendezvous(rank=rank, timeout=LONG)


def test_a_rank_that_looks_for_another_host_is_told_what_to_set() -> None:
    with pytest.raises(
        DistNetworkError, match=rf"{ELSEWHERE}:29500\) is on another host, .*TORCHESTRA_SECRET"
    ):
        rendezvous(f"tcp://{ELSEWHERE}:29500", rank=1, world_size=2, timeout=LONG)


def test_ranks_on_one_host_may_call_it_by_its_name(port: int) -> None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, port)
    except OSError:
        pytest.skip("this host does not know its own name")

    def meet(rank: int) -> int:
        return rendezvous(f"tcp://{name}:{port}", rank=rank, world_size=2, timeout=LONG).rank

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(meet, range(2))) == [0, 1]


def test_who_waits_in_vain_without_a_secret_is_told_that_this_may_be_why(port: int) -> None:
    words = r"for rank 1 to come; .* Ranks on other hosts, .* cannot come without TORCHESTRA_SECRET"
    with pytest.raises(StoreTimeoutError, match=words):
        rendezvous(f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=0.05)
    with pytest.raises(StoreTimeoutError) as caught:
        rendezvous("tcp://127.0.0.1:0", rank=0, world_size=2, timeout=0.05, secret="ours")
    assert "TORCHESTRA_SECRET" not in str(caught.value)


def test_the_port_that_mpi_ranks_are_told_is_never_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else waits for a port to become free, on a host of many users, does not get it."""
    thieves: list[socket.socket] = []
    close = socket.socket.close

    def close_and_take(closed: socket.socket) -> None:
        listening = closed.fileno() >= 0 and closed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        where = closed.getsockname() if listening and closed.family == socket.AF_INET else None
        close(closed)
        if where is not None:
            thieves.append(socket.create_server(where))

    monkeypatch.setattr(socket.socket, "close", close_and_take)
    try:
        address = over_mpi._serve(b"ours")
        TCPStore("127.0.0.1", address.port, timeout=LONG, secret="ours").set("key", "value")
        assert thieves == []
        assert over_mpi._serve(b"ours").port != address.port
    finally:
        monkeypatch.undo()
        for thief in thieves:
            thief.close()
        while shared_server._kept:
            shared_server._kept.popitem()[1].end()
