"""Flight records as a table with a row for each operation of each rank, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from dataclasses import astuple, fields
from pathlib import Path
from typing import get_args, get_type_hints

from torchestra.engine.recorder.formats.rows import Row, Table
from torchestra.engine.recorder.trace import replacing
from torchestra.errors import DistError

_COLUMNS = [field.name for field in fields(Row)]


def write_csv(path: Path, table: Table) -> int:
    """Write the rows below the names of :class:`Row`'s attributes; return the number of files."""
    with replacing(path) as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(astuple(row) for row in table.rows)
    return 1


def write_parquet(path: Path, table: Table) -> int:
    """Write the same columns as Parquet; return the number of files.

    Raises:
        DistError: polars, which writes it, is not installed.
    """
    try:
        import polars
    except ImportError as error:
        raise DistError(
            f"{path}: Parquet is written by polars, which is not installed; pip install"
            " 'torchestra[parquet]', or write .csv"
        ) from error
    # The same types in all files, also where no row has a value: what puts files together asks for that.
    types = {int: polars.Int64, float: polars.Float64, bool: polars.Boolean, str: polars.String}
    schema = {name: types[(get_args(hint) or (hint,))[0]] for name, hint in get_type_hints(Row).items()}
    columns = {name: [getattr(row, name) for row in table.rows] for name in _COLUMNS}
    whole = io.BytesIO()  # polars' error where a disk is full would be its own, and no OSError
    polars.DataFrame(columns, schema, strict=False).write_parquet(whole)
    with replacing(path, binary=True) as file:
        file.write(whole.getbuffer())
    return 1
