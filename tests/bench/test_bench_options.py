"""Test what the command line accepts, and what it refuses before anything is started."""

import argparse
from pathlib import Path

import pytest

from benchmarks.command import add_arguments, main, options_from
from benchmarks.measuring import cells_of
from benchmarks.options import BenchOptions, MpiEnvironment
from torchestra.errors import InvalidArgumentError
from torchestra.monitor.bench import parse_size, size_label


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("4B", 4), ("64KB", 65536), ("64 kb", 65536), ("1M", 1 << 20), ("2GB", 2 << 30)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KB", "0", "-4", "1.5MB", "4 TB", "4KK"])
def test_other_sizes_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="size must be"):
        parse_size(text)


@pytest.mark.parametrize("size", [4, 12, 4096, 65536, 3 << 20, 1 << 30])
def test_a_label_is_read_back_as_its_size(size):
    assert parse_size(size_label(size)) == size


def test_the_defaults_of_the_command_are_those_of_the_options():
    assert options_from(parse()) == BenchOptions()


def test_arguments_become_options():
    options = options_from(
        parse(
            *("--nproc", "4,2,2", "--ops", "barrier,reduce", "--sizes", "4B,1MB", "--peers", "gloo,mpich"),
            *("--mpi", "My MPI=/opt/bin/python", "--rounds", "2", "--seconds", "0.5", "--output", "there"),
            *("--sections", "startup", "--markdown", "--loaded"),
        )
    )
    assert options == BenchOptions(
        operations=("barrier", "reduce"),
        sizes=(4, 1 << 20),
        nproc=(2, 4),
        peers=("gloo", "mpich"),
        mpi=(MpiEnvironment("My MPI", Path("/opt/bin/python")),),
        rounds=2,
        seconds=0.5,
        sections=("startup",),
        output=Path("there"),
        markdown=True,
        loaded=True,
    )


def test_quick_shortens_what_is_not_said_otherwise():
    quick = options_from(parse("--quick", "--sizes", "64MB"))
    assert quick.rounds == 1
    assert quick.seconds < BenchOptions().seconds
    assert quick.sizes == (64 << 20,)
    assert quick.sections == ("collectives",)
    assert len(options_from(parse("--quick")).sizes) < len(BenchOptions().sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "all_reduse"], "unknown operation 'all_reduse'; known are all_reduce"),
        (["--ops", ","], "no operation was given"),
        (["--sections", "lunch"], "unknown section 'lunch'"),
        (["--nproc", "1"], "nproc must be at least 2"),
        (["--nproc", "two"], "nproc must be numbers, got 'two'"),
        (["--sizes", "3"], "multiple of 4"),
        (["--sizes", "5"], "multiple of 4"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--seconds", "nan"], "seconds above 0"),
        (["--mpi", "mpich"], "--mpi must be NAME=PYTHON, got 'mpich'"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(arguments, message, capsys):
    assert main(parse(*arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_barrier_has_one_cell_and_the_others_one_per_size():
    options = BenchOptions(operations=("reduce", "barrier"), sizes=(4, 8))
    assert cells_of(options) == [("reduce", 4), ("reduce", 8), ("barrier", 0)]
