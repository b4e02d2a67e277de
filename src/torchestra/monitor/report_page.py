"""A page of a flight record: sentences first, then charts. One file, which loads nothing else.

The charts are drawn by bokeh, whose script the page contains (1.3 MB).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from torchestra.engine.recorder.trace import replacing
from torchestra.errors import DistError
from torchestra.monitor.analysis.calls import CallEdge
from torchestra.monitor.analysis.causes import Readings
from torchestra.monitor.analysis.summary import GroupAnalysis, seconds, sentences
from torchestra.monitor.diagnosis import diagnosis_sentences

_PLACEHOLDERS = ("<!--SCRIPT-->", "<!--BODY-->", "<!--DRAWING-->")
_MAX_CALLS = 50


def write_page(
    path: Path,
    analyses: Sequence[GroupAnalysis],
    copies: Mapping[int, float] | None,
    diagnoses: Sequence[tuple[str, str]] = (),
    nothing: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        analyses: of the groups, in the order in which the page has them.
        copies: by size, how many bytes one core of the machine copies a second; None: it is not known.
        diagnoses: groups that hang or were aborted, and why, which the page says first.
        nothing: if there are no analyses, why, in sentences.

    Raises:
        DistError: bokeh is not installed.
        OSError: the file cannot be written.
    """
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError as error:
        raise DistError(
            f"{path}: the page is drawn by bokeh, which is not installed: pip install 'torchestra[report]',"
            " or write a trace for https://ui.perfetto.dev with --out trace.json"
        ) from error
    figures: dict[str, Any] = {}
    sections = [_section(number, each, copies, figures) for number, each in enumerate(analyses)]
    body = "\n".join([*_hangs(diagnoses), *_listed(nothing), *sections])
    drawing, divisions = components(figures) if figures else ("", {})
    for name, division in divisions.items():
        body = body.replace(f"<!--{name}-->", division)
    page = resources.files("torchestra.monitor").joinpath("report_page.html").read_text(encoding="utf-8")
    script = Resources(mode="inline", components=["bokeh"]).render_js()
    for placeholder, content in zip(_PLACEHOLDERS, (script, body, drawing), strict=True):
        page = page.replace(placeholder, content)
    with replacing(path) as file:
        file.write(page)


def _hangs(diagnoses: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Return the list of diagnoses in HTML, if there are any."""
    yield from _listed(diagnosis_sentences(diagnoses), ' class="hangs"')


def _listed(told: Sequence[str], attributes: str = "") -> Iterator[str]:
    if told:
        lines = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in told)
        yield f"<ul{attributes}>{lines}</ul>"


def _section(
    number: int, analysis: GroupAnalysis, copies: Mapping[int, float] | None, figures: dict[str, Any]
) -> str:
    """Return the part of a group in HTML; its charts are put into ``figures``, by the name of their place."""
    from torchestra.monitor.report_charts import charts

    group = analysis.group
    head = f"<h1>group {escape(repr(group.name))}, {group.size} ranks</h1>"
    parts = [head, *_listed(sentences(analysis, copies))]
    for index, (title, caption, figure) in enumerate(charts(analysis, copies)):
        name = f"chart_{number}_{index}"
        figures[name] = figure
        parts.append(f"<h2>{escape(title)}</h2><p>{escape(caption)}</p><!--{name}-->")
    if analysis.calls:
        parts.append(_calls_table(analysis.calls))
    if analysis.readings:
        parts += ["<h2>The ranks' processes</h2>", _readings_table(analysis.readings)]
    return "\n".join(parts)


def _readings_table(readings: Sequence[Readings]) -> str:
    looked_s = max(each.seconds for each in readings)
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in _cells(readings[0]))
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for _, text in _cells(each)) + "</tr>"
        for each in readings
    )
    return (
        f"<p>Read from outside for {looked_s:.1f} s, while the report was made. Without a core: the main"
        " thread could run, and all cores were taken.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _calls_table(edges: Sequence[CallEdge]) -> str:
    rows = [
        ("several" if edge.caller < 0 else str(edge.caller), str(edge.callee), name, f"{calls:,}",
         seconds(took), seconds(took / calls))
        for edge in edges
        for name, calls, took in edge.functions
    ][:_MAX_CALLS]  # fmt: skip
    head = "".join(
        f"<th>{name}</th>" for name in ("caller", "executed by", "function", "calls", "time", "of one call")
    )
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(readings: Readings) -> Iterator[tuple[str, str]]:
    yield "rank", str(readings.rank)
    yield "on a core", f"{readings.on_core:.0%}"
    yield "without a core", f"{readings.queued:.0%}"
    yield "running threads", f"{readings.threads:.1f}"
    yield "page faults / s", f"{readings.minor_faults:,.0f}"
    yield "from disk / s", f"{readings.major_faults:,.0f}"
    yield "read MB / s", f"{readings.read_bytes / 1e6:,.1f}"
    yield "MHz", "?" if readings.mhz is None else f"{readings.mhz:,.0f}"
    yield "lines", "; ".join(f"{site} ({share:.0%})" for site, share in readings.lines) or "?"
