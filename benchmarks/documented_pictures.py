"""Pictures of two tables of docs/benchmarks.md: what training costs, and what of a call is Python.

    python -m benchmarks.documented_pictures

Writes docs/benchmark-training.png and docs/benchmark-calls.png. Each carries the digest of the table it was
drawn from, so that ``tests/docs`` can tell when the numbers have changed and the picture has not. (The third
one, docs/benchmark.png, is drawn by ``python -m benchmarks``.)
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = {"benchmark-training.png": "Training", "benchmark-calls.png": "What of a small call is Python"}
OURS, GLOO, KERNEL = "#d6006c", "#6b6b6b", "#f3a6cb"


def table_of(heading: str) -> list[list[str]]:
    """Return the rows, header first, of the tables of docs/benchmarks.md under a heading that begins so."""
    text = (DOCS / "benchmarks.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    lines = next(part for part in section if part.startswith(heading)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if not set("".join(row)) <= set("-:")]


def digest(rows: list[list[str]]) -> str:
    """Return the digest of a table, which the picture drawn from it carries."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def draw_training(axes: Any, rows: list[list[str]]) -> None:
    """Draw two bars for every model and number of ranks: what each DDP adds, in milliseconds."""
    labels = []
    for place, (name, ours, gloo, ratio) in enumerate(rows[1:]):
        for offset, text, colour in ((-0.2, ours, OURS), (0.2, gloo, GLOO)):
            milliseconds = _number(text) / 1e3
            axes.barh(place + offset, milliseconds, 0.38, color=colour)
            axes.text(milliseconds, place + offset, f" {milliseconds:.3g} ms", fontsize=8, va="center")
        labels.append(f"{name.partition(': alone')[0]}\n{ratio} times less")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_title("what data parallelism adds to a forward and a backward, in ms", loc="left", fontsize=11)
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 20)
    _finish(axes, {"torchestra": OURS, "torch's DDP on Gloo": GLOO})


def draw_calls(axes: Any, rows: list[list[str]]) -> None:
    """Draw a bar for every operation and small size, in two parts: the kernel, and the Python around it."""
    sizes = [cell.partition(":")[0] for cell in rows[0][1::2]][:2]
    labels: list[str] = []
    ranks = ""
    for name, *cells in rows[1:]:
        operation, _, told = name.partition(", ")
        ranks = told or ranks
        for size, call, kernel in zip(sizes, cells[::2], cells[1::2], strict=False):
            axes.barh(len(labels), _number(kernel), color=KERNEL)
            axes.barh(len(labels), _number(call) - _number(kernel), left=_number(kernel), color=OURS)
            labels.append(f"{operation} of {size}, {ranks}")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_title("a small call, in µs", loc="left", fontsize=11)
    _finish(axes, {"kernel": KERNEL, "the Python around it": OURS})


def _number(text: str) -> float:
    match = re.match(r"[\d.]+", text)
    assert match is not None, f"{text!r} does not begin with a number"
    return float(match[0])


def _finish(axes: Any, colours: dict[str, str]) -> None:
    for label, colour in colours.items():
        axes.barh([0], [0], color=colour, label=label)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Draw both pictures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for (name, heading), draw in zip(PICTURES.items(), (draw_training, draw_calls), strict=True):
        rows = table_of(heading)
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        mark = digest(rows)
        draw(figure.subplots(), rows)
        figure.savefig(DOCS / name, dpi=110, metadata={"Table": mark})


if __name__ == "__main__":
    main()
