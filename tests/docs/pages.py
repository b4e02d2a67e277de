"""The code on README.md, CONTRIBUTING.md and the pages under docs/, cut into programs that can be run.

The Python blocks of a page are one program: each goes on where the one before ended, on every rank of some.
What a reader need not see stands in HTML comments, which neither GitHub nor the documentation shows:

``<!-- run: 4 threads -->``
    a new program begins, on so many ranks of this kind (at first: 2 threads). The ranks are in a default
    group unless the program calls ``init_process_group`` itself.
``<!-- run: pytest -->``
    a new program begins: a test file, for pytest.
``<!-- code ... -->``
    Python of the program that is not shown: what it takes for granted, or what checks the block above.
``<!-- raises: NAME -->``
    the next block ends by this error, on every rank.
``<!-- file: NAME -->``
    the next block is a file, which the commands of the page run; it is no part of a program.
``<!-- run this -->``
    the next block of commands is run, in a folder with the page's files, and prints what the block shows.
``<!-- not run: REASON -->``
    the next block is not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = {"thread": "threads", "process": "processes"}
SHELL = ("console", "sh", "bash")
SHOWN_ONLY = ("text", "c", "json", "toml", "yaml", "")

_DIRECTIVE = re.compile(r"<!--\s*(run this|run|code|raises|file|not run)\b:?\s*(.*?)\s*-->\s*", re.DOTALL)
_RANKS = re.compile(r"([1-9]) (thread|process)(?:s|es)?")


@dataclass(frozen=True)
class Piece:
    """Some Python: a block, or what a comment holds.

    Attributes:
        line: the number of the line before its first.
        raises: the error that it ends by.
    """

    text: str
    line: int
    raises: str | None = None


@dataclass
class Program:
    """Hold pieces of Python that follow each other and run as one program.

    Attributes:
        kind: ``threads`` or ``processes``; ``pytest`` for a test file.
    """

    page: str
    line: int
    kind: str = "threads"
    size: int = 2
    pieces: list[Piece] = field(default_factory=list)

    @property
    def starts_itself(self) -> bool:
        """Return whether it makes the default group."""
        return any("init_process_group(" in piece.text for piece in self.pieces)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Commands:
    """A block of shell commands, and what it shows beneath them (``console`` only)."""

    page: str
    line: int
    commands: list[str]
    output: list[str]
    run: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """All code of a page.

    Attributes:
        files: the contents of the files that the page shows, by name.
        not_run: the reasons, by line.
    """

    name: str
    programs: list[Program] = field(default_factory=list)
    commands: list[Commands] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    not_run: dict[int, str] = field(default_factory=dict)


def read(path: Path) -> Page:
    """Read a page.

    Raises:
        ValueError: a block has no language, or one that nobody checks; or a comment applies to nothing.
    """
    name = path.relative_to(ROOT).as_posix()
    page, program = Page(name), Program(name, 1)
    pending: dict[str, str] = {}  # directives for the next block
    for kind, line, text in _parts(name, path.read_text()):
        if kind == "comment":
            match = _DIRECTIVE.fullmatch(text)
            if match is None:
                continue
            word, argument = match.groups()
            if word == "run":
                program = _begun(name, line, argument)
                page.programs.append(program)
            elif word == "code":
                program.pieces.append(Piece(argument + "\n", line + text[: match.start(2)].count("\n")))
            else:
                pending[word] = argument
            continue
        if "not run" in pending:
            page.not_run[line] = pending.pop("not run")
        elif "file" in pending:
            page.files[pending.pop("file")] = text
        elif kind == "python":
            program.pieces.append(Piece(text, line, pending.pop("raises", None)))
        elif kind in SHELL:
            page.commands.append(_commands(name, line, kind, text, pending.pop("run this", None) is not None))
        if pending:
            raise ValueError(f"{name}:{line}: {sorted(pending)} is not for a block of {kind}")
        if program.pieces and program not in page.programs:
            page.programs.append(program)
    if pending:
        raise ValueError(f"{name}: {sorted(pending)} is for a block that does not come")
    return page


def _begun(page: str, line: int, argument: str) -> Program:
    if argument == "pytest":
        return Program(page, line, "pytest", 0)
    ranks = _RANKS.fullmatch(argument)
    if ranks is None:
        raise ValueError(f"{page}:{line}: run {argument!r}? There are '4 threads', '2 processes', 'pytest'")
    return Program(page, line, KINDS[ranks[2]], int(ranks[1]))


def _parts(page: str, text: str) -> Iterator[tuple[str, int, str]]:
    """The blocks and comments of a page: a block's language or ``comment``, the line before it, the text."""
    for token in MarkdownIt().enable("table").parse(text):
        line = token.map[0] if token.map else 0
        if token.type == "html_block" and token.content.startswith("<!--"):
            yield "comment", line, token.content
        elif token.type == "code_block":
            raise ValueError(f"{page}:{line + 1}: code by indentation; put it between ``` and say what it is")
        elif token.type == "fence":
            language = token.info.split()[0] if token.info else ""
            if language.startswith("{"):
                continue  # of the documentation's own
            if language not in ("python", *SHELL, *SHOWN_ONLY) or not language:
                raise ValueError(f"{page}:{line + 1}: a block of {language or 'no language'}; who checks it?")
            yield language, line + 1, token.content


def _commands(page: str, line: int, kind: str, text: str, run: bool) -> Commands:
    lines = text.replace("\\\n", " ").splitlines()
    if kind != "console":
        return Commands(page, line, [each for each in lines if each.strip()], [], run)
    commands = [each.removeprefix("$ ") for each in lines if each.startswith("$ ")]
    return Commands(page, line, commands, [each for each in lines if each and not each.startswith("$ ")], run)
