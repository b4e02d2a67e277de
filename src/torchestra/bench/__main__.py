"""``python -m torchestra.bench`` is ``torchestra bench``."""

from __future__ import annotations

import argparse
import sys

from torchestra.bench.command import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser("torchestra bench")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
