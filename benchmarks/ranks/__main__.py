"""A measured rank: ``python …/bench/ranks/__main__.py KIND``, started by the driver of the benchmark.

The file is run by its path, not as a module of torchestra, because an MPI's environment need not
have torchestra or torch: the package around it is loaded under a name of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_PACKAGE = "torchestra_bench_ranks"


def _load_package(directory: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    # Python put this directory first on the path; its modules must not hide anyone's.
    del sys.path[0]
    _load_package(Path(__file__).resolve().parent)
    importlib.import_module(f"{_PACKAGE}.session").main(sys.argv[1])
