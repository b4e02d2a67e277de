"""``torchestra bench``: the small benchmark of torchestra's own operations."""

import json

import pytest

from torchestra.cli import main
from torchestra.monitor.operation_timing import operations

QUICK = ["bench", "--seconds", "0.002", "--sizes", "4B,4KB"]


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_every_operation_is_timed(kind, capsys):
    threads = ["--threads"] if kind == "threads" else []
    assert main([*QUICK, *threads, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nproc"], found["kind"]) == (2, kind)
    cells = {(cell["operation"], cell["nbytes"]): cell for cell in found["cells"]}
    assert set(cells) == {("barrier", 0)} | {
        (name, size) for name in operations() if name != "barrier" for size in (4, 4096)
    }
    for cell in cells.values():
        assert 0 < cell["best_us"] <= cell["median_us"] <= cell["p99_us"]
        assert cell["calls"] >= 3


def test_the_table_has_a_line_for_each_dtype_and_size(capsys):
    arguments = ["-n", "3", "--threads", "--ops", "all_gather", "--dtypes", "int64,float16", "--symmetric"]
    assert main([*QUICK, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "3 ranks, threads of one process" in printed
    lines = [line.split()[:3] for line in printed.splitlines() if "all_gather" in line]
    assert lines == [["all_gather", dtype, size] for dtype in ("int64", "float16") for size in ("4", "4")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--ops", "juggle"], "unknown operation juggle; there are all_gather,"),
        (["--dtypes", "float33"], "unknown dtype float33; there are bfloat16,"),
        (["--sizes", "4XB"], "a size must be like"),
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["-n", "0"], "nproc must be a positive int"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, error, capsys):
    assert main(["bench", *arguments]) == 2
    assert error in capsys.readouterr().err
