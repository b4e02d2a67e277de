"""Run the installed PyTorch's own distributed tests on torchestra, after the rename.

    python -m tools.conformance [MODULE...] [--tests PART] [--skips] [--json FILE]

The tests are read from the wheel (torch.testing._internal.distributed), renamed into a temporary directory,
and run there in processes of their own, each test under a time limit; nothing of them is kept. Prints how
many passed, failed and were skipped by module, and the failures by reason. The exit code is 0: docs/compat.md
tells what fails and why, and so a failure is no error of the run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from tools.conformance.reporting import general, reason, show
from tools.conformance.running import Ending, run_module
from tools.conformance.sources import SOURCES, Source, cases_of, write_renamed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="parts of their names; default: all")
    parser.add_argument("--tests", default="", metavar="PART", help="only tests with this in their names")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one test may take (%(default)g)")
    parser.add_argument("--jobs", type=int, default=1, help="how many modules at a time (%(default)d)")
    parser.add_argument("--world-size", type=int, help="instead of 2 and 4, where tests leave it open")
    parser.add_argument("--skips", action="store_true", help="also why tests were skipped")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every test's ending into a file")
    return parser.parse_args()


def _runs(source: Source, world_size: int | None) -> list[tuple[str, dict[str, str]]]:
    """Under which names, and with which settings, a module is run."""
    sizes = [world_size] if world_size and source.world_sizes else source.world_sizes
    if not sizes:
        return [(source.name, {})]
    return [(f"{source.name}, {size} ranks", {"WORLD_SIZE": str(size), "BACKEND": "gloo"}) for size in sizes]


def main() -> None:
    """Run what the command line asks for, and print the report."""
    arguments = _arguments()
    console = Console()
    chosen = [
        (source, *run)
        for source in SOURCES
        if not arguments.modules or any(part in source.name for part in arguments.modules)
        for run in _runs(source, arguments.world_size)
    ]

    def tell(ending: Ending) -> None:
        if ending.how != "passed":
            why = general(reason(ending))
            console.print(f"{ending.module}: {ending.test} {ending.how}: {why}", markup=False, soft_wrap=True)

    def run(number: int) -> list[Ending]:
        source, name, settings = chosen[number]
        directory = root / str(number)
        directory.mkdir()
        write_renamed(directory)
        return run_module(
            name,
            cases_of(source),
            directory,
            {**settings, "TEMP_DIR": str(directory), "INIT_METHOD": f"file://{directory}/met"},
            arguments.seconds,
            lambda test: arguments.tests in test,
            tell,
        )

    with tempfile.TemporaryDirectory(prefix="torchestra-conformance-") as temporary:
        root = Path(temporary)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            endings = [ending for ended in pool.map(run, range(len(chosen))) for ending in ended]
    show(endings, console, arguments.skips)
    if arguments.json:
        arguments.json.write_text(json.dumps([ending._asdict() for ending in endings], indent=1))


if __name__ == "__main__":
    main()
