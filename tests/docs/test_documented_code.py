"""The code in README.md and on the pages under docs/ runs. What a page may say about that: see pages.py."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch
from pages import PAGES, Program, read

import torchestra as dist
from fork_server import start_server
from worlds import run

READ = [read(path) for path in PAGES]
PROGRAMS = [program for page in READ for program in page.programs]
NOT_RUN_AT_MOST = 3

INSTALLED = any(point.value == "torchestra.testing.plugin" for point in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "torchestra.testing.plugin")

pytest_plugins = ("pytester",)


@pytest.fixture(scope="module", autouse=True)
def _ranks_start_warm() -> None:
    """The fork server is forked before any test starts a thread."""
    torch.set_num_threads(1)
    start_server()


def run_pieces(program: Program) -> None:
    """On a rank: run a program."""
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for piece in program.pieces:
            # Where an error comes from is told by the line of the page.
            code = compile("\n" * piece.line + piece.text, program.page, "exec", dont_inherit=True)
            if piece.raises is None:
                exec(code, names)
                continue
            with pytest.raises(getattr(dist, piece.raises)):
                exec(code, names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.kind != "pytest"], ids=str)
def test_a_program_runs(program: Program) -> None:
    torch.compiler.reset()
    run(program.kind, program.size, run_pieces, program, init=not program.starts_itself)


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.kind == "pytest"], ids=str)
def test_a_test_file_passes(program: Program, pytester: pytest.Pytester) -> None:
    lines: list[str] = []
    for piece in program.pieces:
        lines += [""] * (piece.line - len(lines)) + piece.text.splitlines()  # the line numbers of the page
    pytester.makepyfile(test_of_the_page="\n".join(lines))
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] > 1


def test_few_blocks_are_not_run() -> None:
    reasons = {f"{page.name}:{line}": reason for page in READ for line, reason in page.not_run.items()}
    assert all(reasons.values()), reasons
    assert len(reasons) <= NOT_RUN_AT_MOST, reasons
