"""Test how MPIs are found, and what their ranks find in their environment."""

import sys
from pathlib import Path

import pytest

from benchmarks.options import BenchOptions, MpiEnvironment
from benchmarks.peers import find_peers, library_name, mpi_peer, peer_key, rank_environment


def pretend_mpi(directory: Path, output: str, code: int = 0, mpiexec: bool = True) -> Path:
    """An interpreter that prints what ``MPI_Get_library_version`` would say."""
    directory.mkdir(parents=True)
    python = directory / "python"
    python.write_text(f"#!/bin/sh\necho '{output}'\necho 'No module named mpi4py' >&2\nexit {code}\n")
    python.chmod(0o755)
    if mpiexec:
        (directory / "mpiexec").write_text("")
    return python


@pytest.fixture
def no_mpi_here(monkeypatch):
    """The interpreter of the tests may have mpi4py; then it would be found too."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


@pytest.mark.usefixtures("no_mpi_here")
def test_environments_beside_the_directory_are_found_and_named_by_their_library(tmp_path):
    pretend_mpi(tmp_path / ".venv-mpich" / "bin", "MPICH Version: 5")
    pretend_mpi(tmp_path / ".venv-openmpi" / "bin", "Open MPI v5.0.11")
    pretend_mpi(tmp_path / ".venv-impi" / "bin", "Intel(R) MPI Library 2021")
    peers, notes = find_peers(BenchOptions(), tmp_path)
    assert notes == []
    assert [column.key for peer in peers for column in peer.columns] == [
        *("torchestra", "symmetric", "persistent", "gloo"),
        *("mpich", "mpich-persistent", "openmpi", "openmpi-persistent"),
        *("intelmpi", "intelmpi-persistent"),
    ]
    oversubscribed = [
        peer.key for peer in peers if "PRTE_MCA_rmaps_default_mapping_policy" in peer.environment
    ]
    assert oversubscribed == ["openmpi"]


@pytest.mark.usefixtures("no_mpi_here")
def test_only_the_peers_that_are_asked_for_are_used_and_missing_ones_are_told(tmp_path):
    peers, notes = find_peers(BenchOptions(peers=("symmetric", "mpich")), tmp_path)
    assert [(peer.key, [column.key for column in peer.columns]) for peer in peers] == [
        ("torchestra", ["symmetric"])
    ]
    assert notes == ["mpich: not found on this machine"]


@pytest.mark.usefixtures("no_mpi_here")
def test_an_mpi_that_is_named_but_cannot_be_used_is_told(tmp_path):
    broken = MpiEnvironment("Mine", pretend_mpi(tmp_path / "broken", "", code=1))
    peers, notes = find_peers(BenchOptions(peers=("gloo", "mine"), mpi=(broken,)), tmp_path)
    assert [peer.key for peer in peers] == ["gloo"]
    assert notes[0].startswith("Mine: mpi4py cannot be used with")
    assert notes[0].endswith("No module named mpi4py")


@pytest.mark.usefixtures("no_mpi_here")
def test_an_mpi_found_on_its_own_that_cannot_be_used_is_passed_over(tmp_path):
    pretend_mpi(tmp_path / ".venv-mpich" / "bin", "", code=1)
    peers, notes = find_peers(BenchOptions(peers=("gloo",)), tmp_path)
    assert [peer.key for peer in peers] == ["gloo"]
    assert notes == []


def test_reasons_why_an_interpreter_is_no_peer(tmp_path, monkeypatch):
    assert mpi_peer(MpiEnvironment("A", tmp_path / "none")) == f"A: there is no {tmp_path / 'none'}"
    monkeypatch.setenv("PATH", "/usr/bin-that-is-not-there:/bin-neither")
    lonely = pretend_mpi(tmp_path / "lonely", "MPICH", mpiexec=False)
    lonely.write_text("#!/bin/sh\necho MPICH\n")
    reason = mpi_peer(MpiEnvironment("B", lonely))
    assert isinstance(reason, str)
    assert "no mpiexec beside" in reason


def test_a_named_mpi_keeps_its_name(tmp_path):
    peer = mpi_peer(MpiEnvironment("Our MPI 2", pretend_mpi(tmp_path / "bin", "MPICH Version: 5")))
    assert not isinstance(peer, str)
    assert (peer.key, peer.columns[0].title) == ("ourmpi2", "Our MPI 2")
    assert peer.mpiexec == tmp_path / "bin" / "mpiexec"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Device: ch4", "MPICH"),
        ("Open MPI v5.0.11, package: Open MPI", "Open MPI"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "Intel MPI"),
        ("Something else", "MPI"),
        ("", "MPI"),
    ],
)
def test_libraries_are_known_by_their_version(version, name):
    assert library_name(version) == name


def test_keys_are_easy_to_type():
    assert peer_key("Open MPI") == "openmpi"


def test_ranks_have_one_thread_and_no_traces_of_another_launcher(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "PMI_RANK",
        "OMPI_COMM_WORLD_RANK",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    environment = rank_environment({"RANK": "1"})
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["NUMPY_MADVISE_HUGEPAGE"] == environment["THP_MEM_ALLOC_ENABLE"] == "0"
    assert environment["RANK"] == "1"
    assert not {"WORLD_SIZE", "MASTER_PORT", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID"} & set(
        environment
    )
    assert "PATH" in environment
