"""``python -m benchmarks``, which ``make bench`` runs."""

from __future__ import annotations

import argparse
import sys

from benchmarks.command import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
