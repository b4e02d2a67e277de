"""Test what a reader gets: ratios, tables, Markdown, JSON, the picture."""

import io
import json
import re

import pytest
from rich.console import Console

from benchmarks.command import write_report
from benchmarks.machine import describe_machine
from benchmarks.options import BenchOptions
from benchmarks.pieces import merged, read_report
from benchmarks.report import BenchReport, Cell, ColumnInfo, SideRow, SideTable
from benchmarks.summary import Timing
from benchmarks.table import format_ratio, format_time, render, summary_lines, to_markdown
from torchestra.errors import InvalidArgumentError

COLUMNS = (
    ColumnInfo("torchestra", "torchestra", "torchestra", "torchestra 1"),
    ColumnInfo("symmetric", "symmetric", "torchestra", "torchestra 1"),
    ColumnInfo("gloo", "Gloo", "gloo", "torch 2"),
    ColumnInfo("mpich", "MPICH", "mpi", "MPICH 5"),
    ColumnInfo("openmpi", "Open MPI", "mpi", "Open MPI 5"),
)
STARTUP = SideTable(
    "startup",
    "Start-up",
    "s",
    (("torchestra", "torchestra run"), ("gloo", "torchrun")),
    (SideRow("2 ranks", {"torchestra": 1.5, "gloo": 3.0}), SideRow("4 ranks", {"gloo": 4.0})),
)


def timing(median: float, right: bool = True) -> Timing:
    return Timing(median, median * 3, median / 2, 10, 5, right)


def cell(world: int, operation: str, size: int, floor: float | None = None, **medians: float) -> Cell:
    return Cell(world, operation, size, {key: timing(value) for key, value in medians.items()}, floor)


def report(*extra: Cell, **changes) -> BenchReport:
    cells = (
        cell(2, "all_reduce", 4, torchestra=2, symmetric=1, gloo=200, mpich=4, openmpi=3),
        cell(2, "all_reduce", 64 << 20, 9000, torchestra=12000, symmetric=9500, gloo=48000, mpich=9000),
        cell(2, "barrier", 0, torchestra=1, gloo=100, mpich=0.5, openmpi=0.25),
        cell(4, "all_reduce", 4, torchestra=4, symmetric=4, gloo=400, mpich=20, openmpi=8),
    )
    values = {
        "machine": describe_machine(),
        "options": {"rounds": 3},
        "columns": COLUMNS,
        "cells": cells + extra,
        "bandwidth": {2: {"update": 50e9}},
        "disturbance": (0.01, 0.02, 0.4),
        "tables": (STARTUP,),
        "notes": ("Intel MPI: no mpiexec",),
        "seconds": 12.0,
    }
    return BenchReport(**(values | changes))


def printed(found: BenchReport, terminal: bool = False) -> str:
    stream = io.StringIO()
    render(found, Console(file=stream, force_terminal=terminal, width=200, color_system="standard"))
    return stream.getvalue()


def test_ratios_are_the_peers_time_over_ours():
    found = report()
    first, second, barrier, _ = found.cells
    assert found.gloo_ratio(first) == 100
    assert found.best_mpi(first) == "openmpi"
    assert found.mpi_ratio(first) == 1.5
    assert found.mpi_ratio(first, "symmetric") == 3
    assert found.best_mpi(second) == "mpich"
    assert found.mpi_ratio(barrier) == 0.25
    assert found.mpi_ratio(barrier, "symmetric") is None


def test_the_means_are_geometric_and_can_be_of_one_world_size():
    found = report()
    assert found.mean(found.gloo_ratio, 4) == pytest.approx(100)
    assert found.mean(found.gloo_ratio) == pytest.approx((100 * 4 * 100 * 100) ** 0.25)
    assert found.mean(found.gloo_ratio, 8) is None


def test_lost_cells_are_those_in_which_the_best_mpi_was_faster():
    assert [(lost.operation, lost.size) for lost in report().lost()] == [
        ("all_reduce", 64 << 20),
        ("barrier", 0),
    ]


def test_a_wrong_result_counts_in_no_ratio_and_is_shown():
    wrong = Cell(2, "gather", 4, {"torchestra": timing(1.0, right=False), "gloo": timing(9.0)})
    found = report(wrong)
    assert not found.right
    assert report().right
    assert found.gloo_ratio(wrong) is None
    assert "WRONG" in printed(found)
    assert "WRONG RESULTS in gather 4 B on 2 by torchestra" in summary_lines(found)


def test_a_wrong_mpi_is_never_the_best():
    only = Cell(2, "gather", 4, {"mpich": timing(1.0, right=False), "openmpi": timing(9.0)})
    assert report(only).best_mpi(only) == "openmpi"


def test_the_terminal_shows_times_ratios_floors_and_what_was_left_out():
    text = printed(report())
    for part in (
        "2 ranks, float32",
        "4 ranks, float32",
        "12.0 ms",
        "9000",
        "/ ours",
        "floor",
        "barrier",
    ):
        assert part in text
    assert "left out: Intel MPI: no mpiexec" in text
    assert "Gloo / torchestra, geometric mean over all cells: 44.7 (2 ranks 34.2, 4 ranks 100)" in text
    assert "cells lost to the best MPI: 2 of 4: all_reduce 64 MB on 2, barrier on 2" in text
    assert "take the numbers with care" in text


def test_a_long_list_of_lost_cells_is_only_counted():
    many = [cell(2, "reduce", 4 << number, torchestra=2, mpich=1) for number in range(20)]
    assert "cells lost to the best MPI: 22 of 24" in summary_lines(report(*many))


def test_lost_cells_are_red_on_a_terminal_and_won_ones_are_not():
    lines = printed(report(), terminal=True).splitlines()
    lost = next(line for line in lines if "64 MB" in line)
    won = next(line for line in lines if "4 B" in line)
    assert re.search(r"\x1b\[1;31m +12.0 ms", lost)
    assert "\x1b[1;31m" not in won
    assert re.search(r"\x1b\[32m +2.00", won)


def test_columns_that_nobody_can_fill_are_not_shown():
    cells = (cell(2, "all_reduce", 4, gloo=200),)
    text = printed(report(cells=cells, columns=(COLUMNS[2],), notes=()))
    assert "best MPI" not in text
    assert "ours" not in text.split("torchrun / ours")[0]
    assert "floor" not in text


def test_markdown_has_a_row_per_cell_and_tables_that_fit_their_headers():
    text = to_markdown(report())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {
        block: {row.count("|") for row in block.splitlines()} for block in text.split("\n\n") if "|" in block
    }
    assert all(len(counts) == 1 for counts in widths.values())
    assert "| all_reduce | 4 B | 2.00 | **1.00** | 200 | 4.00 | 3.00 | 3.00 | 100 | 1.50 |  |" in rows
    assert "| 2 ranks | 1.50 | 3.00 | 2.00 |" in rows
    assert "| 4 ranks | - | 4.00 | - |" in rows


def test_only_the_fastest_of_a_row_is_bold_in_markdown():
    assert "| all_reduce | 64 MB | 12.0 ms | 9500 | 48.0 ms | **9000** | - | 9000 |" in to_markdown(report())


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.7312, "0.73"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (28.44, "28.4"),
        (1122.4, "1122"),
        (11_290, "11.3 ms"),
    ],
)
def test_times_have_about_three_digits(microseconds, text):
    assert format_time(microseconds) == text


@pytest.mark.parametrize(("ratio", "text"), [(None, "-"), (0.912, "0.91"), (30.04, "30.0"), (542.4, "542")])
def test_ratios_have_about_three_digits(ratio, text):
    assert format_ratio(ratio) == text


def test_json_holds_every_number_and_can_be_read_back(tmp_path):
    options = BenchOptions(output=tmp_path / "new" / "place")
    written = write_report(report(cells=()), options)
    assert [path.name for path in written] == ["bench.json"]
    assert json.loads(written[0].read_text())["cells"] == []
    data = json.loads(json.dumps(report().to_json()))
    assert data["cells"][0]["peers"]["gloo"] == {
        "median_us": 200,
        "p99_us": 600,
        "best_us": 100,
        "batches": 10,
        "batch": 5,
        "right": True,
    }
    assert data["cells"][0]["best_mpi"] == "openmpi"
    assert data["gloo_over_torchestra"]["4"] == pytest.approx(100)
    assert data["bandwidth_bytes_per_second"]["2"]["update"] == 50e9
    assert data["machine"]["cores"] >= 1
    assert data["tables"][0]["rows"][0]["values"] == {"torchestra": 1.5, "gloo": 3.0}


def test_the_picture_is_a_png_with_a_panel_per_operation(tmp_path):
    pytest.importorskip("matplotlib")
    written = write_report(report(), BenchOptions(output=tmp_path, markdown=True))
    assert [path.name for path in written] == ["bench.json", "bench.png", "bench.md"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert written[1].stat().st_size > 20_000


def test_what_is_written_replaces_a_link_that_lies_in_its_place(tmp_path):
    pytest.importorskip("matplotlib")
    precious = tmp_path / "precious"
    precious.write_text("not to be overwritten")
    results = tmp_path / "results"
    results.mkdir()
    for name in ("bench.json", "bench.png", "bench.md"):
        (results / name).symlink_to(precious)
    written = write_report(report(), BenchOptions(output=results, markdown=True))
    assert precious.read_text() == "not to be overwritten"
    assert not any(path.is_symlink() for path in written)


PERSISTENT = ColumnInfo("persistent", "persistent", "torchestra", "", "persistent")
MPI_PERSISTENT = ColumnInfo("mpich-persistent", "MPICH persistent", "mpi", "", "persistent")


def test_a_kind_stands_ahead_where_it_is_faster_than_the_best_of_all_others():
    found = report(
        cell(4, "broadcast", 4, torchestra=2, persistent=1, gloo=1.5, mpich=4, **{"mpich-persistent": 3}),
        columns=(*COLUMNS, PERSISTENT, MPI_PERSISTENT),
    )
    ordinary, symmetric, persistent = found.standings()
    assert (ordinary.ahead, ordinary.cells) == (2, 5)  # not where Gloo is, nor in a barrier
    assert ordinary.mpi_mean == pytest.approx((3 / 2 * 9 / 12 * 0.25 * 2 * 2) ** (1 / 5))
    assert (symmetric.ahead, symmetric.cells) == (2, 3)
    assert (persistent.ahead, persistent.cells, persistent.mpi_mean) == (1, 1, pytest.approx(3))
    text = " ".join(printed(found).split())
    assert "persistent: ahead of the best of Gloo and the MPIs in 1 of 1 cells, geometric mean 3.00" in text
    assert "MPICH persistent" not in text


def test_a_wrong_result_is_never_ahead():
    wrong = Cell(2, "reduce", 4, {"torchestra": timing(1, right=False), "gloo": timing(100)})
    assert [(each.ahead, each.cells) for each in report(cells=(wrong,)).standings()] == [(0, 1)]


def test_pieces_make_one_report(tmp_path):
    options = BenchOptions(output=tmp_path)
    path, *_ = write_report(report(cells=report().cells[:2]), options)
    later = cell(2, "all_reduce", 4, torchestra=9)
    found = merged(read_report(path), report(later, cells=(*report().cells[2:], later), notes=("new",)))
    assert [(each.world, each.operation, each.size) for each in found.cells] == [
        (2, "all_reduce", 4),
        (2, "all_reduce", 64 << 20),
        (2, "barrier", 0),
        (4, "all_reduce", 4),
    ]
    assert found.cells[0] == later
    assert found.cells[1] == report().cells[1]
    assert found.tables == report().tables
    assert found.notes == (*report().notes, "new")
    assert found.seconds == 24.0


def test_pieces_of_other_machines_or_ways_to_measure_are_refused(tmp_path):
    for changes in ({"machine": {"processor": "another"}}, {"options": {"dirtied": True}}):
        with pytest.raises(InvalidArgumentError, match="pieces must be measured alike"):
            merged(report(), report(**changes))
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="has no report"):
        read_report(tmp_path / "bench.json")
