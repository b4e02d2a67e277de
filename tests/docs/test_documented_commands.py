"""The commands in README.md and on the pages under docs/ exist, and so do their options and files."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Commands, Page, read

import torchestra
from torchestra.cli import COMMANDS
from warm_programs import is_python, run_warm

READ = [read(path) for path in PAGES]
BLOCKS = [(page, block) for page in READ for block in page.commands]
RUN = [(page, block) for page, block in BLOCKS if block.run]
# Other people's programs, whose arguments are not checked here.
NOT_OURS = {"export", "mpiexec", "srun", "torchrun"}
RUN_SECONDS = 250


def parser_of(name: str) -> argparse.ArgumentParser:
    assert name in COMMANDS, f"there is no `torchestra {name}`"
    parser = argparse.ArgumentParser(f"torchestra {name}")
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    return parser


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def extras() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    return set(re.findall(r"^(\w+) = ", section.partition("\n\n")[0], re.MULTILINE))


def words_of(line: str) -> Iterator[list[str]]:
    """The commands of a line, each by its words, without the variables that it sets."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;"):
            if command:
                yield command
            command = []
        elif command or not re.match(r"\w+=", word):
            command.append(word)


def check_file(name: str) -> None:
    # A name without a folder is the reader's own file.
    assert "/" not in name or (ROOT / name).exists(), f"there is no file {name}"


def check(words: list[str]) -> None:
    """Fail if a command is not as it should be."""
    program, *arguments = words
    program = Path(program).name
    if re.fullmatch(r"python3?", program) and arguments[:1] == ["-m"]:
        program, *arguments = arguments[1:]
    if program == "torchestra":
        options = parser_of(arguments[0]).parse_args(arguments[1:])
        if hasattr(options, "script"):
            check_file(options.script)
    elif program == "benchmarks":
        parser = argparse.ArgumentParser(program)
        importlib.import_module("benchmarks.command").add_arguments(parser)
        parser.parse_args(arguments)
    elif program.startswith("torchestra."):
        assert importlib.util.find_spec(program) is not None
        check_file(arguments[0])
    elif program == "make":
        assert {each for each in arguments if "=" not in each} <= make_targets()
    elif program in ("pip", "pytest"):
        files = [each for each in arguments if each.endswith((".py", ".txt"))]
        for name in files:
            check_file(f"./{name}")
        asked = re.findall(r"\.\[(.*?)\]", " ".join(arguments))
        assert {extra for each in asked for extra in each.split(",")} <= extras()
    elif re.fullmatch(r"python3?", program):
        check_file(arguments[0])
    else:
        assert program in {*NOT_OURS, "venv"} or program.startswith("torch."), f"who checks {program}?"


@pytest.mark.parametrize("block", [block for _, block in BLOCKS], ids=str)
def test_commands_are_understood(block: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    assert block.commands
    for line in block.commands:
        for words in words_of(line):
            try:
                check(words)
            except SystemExit:
                pytest.fail(f"{line}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_within_a_text_have_such_options(path: Path) -> None:
    text = path.read_text().replace("\n", " ")
    for line in re.findall(r"`(?:python -m )?torchestra ([a-z]+(?: .*?)?)`", text):
        name, *arguments = shlex.split(line)
        known = parser_of(name)._option_string_actions
        # What follows a script is the script's.
        for word in arguments[: next((i for i, each in enumerate(arguments) if each.endswith(".py")), None)]:
            assert not word.startswith("-") or word.partition("=")[0] in known, line
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in make_targets()


@pytest.mark.parametrize(("page", "block"), RUN, ids=[str(block) for _, block in RUN])
def test_commands_print_what_the_page_shows(
    page: Page, block: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(torchestra.__file__).parents[1]))
    for name, text in page.files.items():
        (tmp_path / name).write_text(text)
    printed = ""
    for line in block.commands:
        words = [sys.executable if word == "python" else word for word in shlex.split(line)]
        if words[0] == "torchestra":
            words = [sys.executable, "-m", *words]
        run = run_warm if is_python(words) else subprocess.run
        done = run(words, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    # Ranks print in any order.
    assert sorted(printed.splitlines()) == sorted(block.output)
