"""Feed everything that reads what others write with bytes that nobody writes, for long.

    python tools/fuzz.py [--minutes 10] [--seed 1] [--list] [NAME ...]

Every target of tools/fuzzing gets an equal share of the time. The exit code is 1 if one of them raised what
its callers do not deal with, or took too much time or memory; the smallest input that shows it is printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `tools`, also from a wheel's checkout

from tools.fuzzing import Target, feed, inputs
from tools.fuzzing.targets import targets

_AT_ONCE = 500


def main() -> int:
    """Feed the targets named, or all."""
    options = _parser().parse_args()
    known = targets()
    chosen = [target for target in known if not options.names or target.name in options.names]
    if unknown := set(options.names) - {target.name for target in known}:
        _parser().error(f"no such target: {', '.join(sorted(unknown))}; see --list")
    if options.list:
        print("\n".join(target.name for target in known))
        return 0
    print(f"seed {options.seed}")
    dice = random.Random(options.seed)
    broken = [target.name for target in chosen if not _hold(target, options.minutes * 60 / len(chosen), dice)]
    print(f"broken: {', '.join(broken)}" if broken else "all held")
    return int(bool(broken))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets to feed; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long all take together (10)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    return parser


def _hold(target: Target, seconds: float, dice: random.Random) -> bool:
    """Feed a target for so long; return whether it held."""
    counts = {True: 0, False: 0}
    until = time.monotonic() + seconds
    phases = (Phase.generate, Phase.shrink)

    def run() -> None:
        @seed(dice.getrandbits(64))
        @settings(
            max_examples=_AT_ONCE,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs(target.seeds))
        def feed_it(data: bytes) -> None:
            counts[feed(target, data)] += 1

        feed_it()

    try:
        while time.monotonic() < until:
            run()
    except Exception:
        traceback.print_exc()
        return False
    finally:
        print(f"{target.name}: {counts[True]:,} inputs read, {counts[False]:,} refused", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
