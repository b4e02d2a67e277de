"""The fixtures of all tests (conftest.py)."""

from __future__ import annotations

import multiprocessing.util
import tempfile
from pathlib import Path


def test_the_folder_of_multiprocessing_is_not_removed_before_it_is() -> None:
    """multiprocessing removes it when the interpreter ends, and complains there if it is gone."""
    assert Path(tempfile.gettempdir()) not in Path(multiprocessing.util.get_temp_dir()).parents
