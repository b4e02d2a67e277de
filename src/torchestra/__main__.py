"""``python -m torchestra`` is the ``torchestra`` command."""

from __future__ import annotations

import sys

from torchestra.cli import main

if __name__ == "__main__":
    sys.exit(main())
