"""Attack torchestra as strangers would, and see that nothing gets through and nothing ends.

    python tools/attack.py [--minutes 10] [--list] [NAME ...]

Every module of tools/attacks is an attack; each gets an equal share of the time. The table says what was
tried, how often, and what was turned away; what cannot be tried here (much needs root) is named with the
reason. The exit code is 1 if anything got through, ended, or was not served as it should be.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `tools`, also from a wheel's checkout

from tools import attacks
from tools.attacks import Outcome


def main() -> int:
    """Run the attacks named, or all."""
    options = _parser().parse_args()
    chosen = options.names or attacks.names()
    if unknown := set(chosen) - set(attacks.names()):
        _parser().error(f"no such attack: {', '.join(sorted(unknown))}; see --list")
    if options.list:
        for name in chosen:
            print(f"{name}: {attacks.load(name).__doc__.splitlines()[0]}")
        return 0
    console = Console()
    table = Table("attack", "tried", "turned away", "result", show_lines=True)
    failed = False
    for name in chosen:
        module = attacks.load(name)
        if reason := attacks.hindrance(module):
            table.add_row(name, "", "", f"not tried: {reason}")
            continue
        console.print(f"{name}: {module.__doc__.splitlines()[0]}")
        outcome = _run(module, options.minutes * 60 / len(chosen))
        failed = failed or bool(outcome.broken)
        table.add_row(name, _counts(outcome.tried), _counts(outcome.refused), _result(outcome))
    console.print(table)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks to run; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long all take together (10)")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    return parser


def _run(module: attacks.Attack, seconds: float) -> Outcome:
    began = time.monotonic()
    try:
        outcome = module.attack(seconds)
    except Exception:
        traceback.print_exc()
        outcome = Outcome(broken=["the attack failed itself, see above"])
    outcome.tried["seconds"] = round(time.monotonic() - began)
    return outcome


def _counts(counts: dict[str, int]) -> str:
    return "\n".join(f"{count:,} {what}" for what, count in counts.items())


def _result(outcome: Outcome) -> str:
    return "\n".join(f"BROKEN: {line}" for line in outcome.broken) or "held"


if __name__ == "__main__":
    sys.exit(main())
