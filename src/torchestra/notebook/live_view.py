"""The view of ``%ranks_top``: what ``torchestra top`` shows in a terminal, in a notebook.

A thread looks at the job that this process has started last, from outside as ``top`` does, and draws a page
of all ranks and a page of each rank. All pages are sent each time, and the browser shows one of them: while a
cell runs, the kernel does not hear which one is wanted.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchestra.monitor.jobs import Job, find_jobs
from torchestra.monitor.live.job_table import group_tables, membership_lines
from torchestra.monitor.live.rank_page import rank_page
from torchestra.monitor.live.samples import JobSample, JobSampler, changes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_INTERVAL_S = 1.0
_MAX_RANK_PAGES = 32
_WIDTH = 120  # of a page, in characters
_HTML = '<pre style="white-space: pre; overflow-x: auto; font-size: 90%; line-height: 1.3">{code}</pre>'


class ViewPage(NamedTuple):
    """What is shown at once."""

    name: str
    parts: Sequence[RenderableType]


class ViewOutput(Protocol):
    """Where pages are shown, below a cell."""

    def show(self, pages: Sequence[ViewPage]) -> None:
        """Show these pages in the place of the last ones; the first is that of all ranks."""


class WidgetOutput:
    """Shows pages as a widget, in which one is chosen.

    Raises:
        ImportError: ipywidgets is not installed.
    """

    def __init__(self) -> None:
        import ipywidgets
        from IPython.display import display

        self._new_page = ipywidgets.HTML
        self._choice: Any = ipywidgets.Dropdown(description="show")
        self._pages: Any = ipywidgets.Stack()
        self._made: list[Any] = []  # all pages until now: the kernel and the browser hold them for good
        # In the browser: what the kernel is told while a cell runs, it reads when that has ended.
        self._link = ipywidgets.jslink((self._choice, "index"), (self._pages, "selected_index"))
        display(ipywidgets.VBox([self._choice, self._pages]))

    def show(self, pages: Sequence[ViewPage]) -> None:
        """Draw the pages; the one that is chosen stays so as long as the same pages are there."""
        names = tuple(page.name for page in pages)
        if names != self._choice.options:
            self._made += [self._new_page() for _ in pages[len(self._made) :]]
            self._pages.children = self._made[: len(pages)]
            self._choice.options = names
            self._choice.index = 0
        for widget, page in zip(self._pages.children, pages, strict=True):
            widget.value = as_html(page)


class TextOutput:
    """Shows the first page as text, where there are no widgets."""

    def __init__(self) -> None:
        from IPython.display import display

        self._text = ""
        self._shown: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self, pages: Sequence[ViewPage]) -> None:
        """Replace the text."""
        text = as_text(pages[0])
        if text != self._text:
            self._text = text
            self._shown.update({"text/plain": text}, raw=True)


class OwnJob:
    """The job that this process has started last, or that its threads are the ranks of."""

    def __init__(self) -> None:
        self._sampler: JobSampler | None = None
        self._pid: int | None = None
        self._before: JobSample | None = None
        self._after: JobSample | None = None

    def pages(self) -> list[ViewPage]:
        """Look at the job, and draw it; as it was last, if it has ended."""
        from rich.text import Text

        sample = self._sample()
        if sample is not None:
            self._before, self._after = self._after, sample
        if self._after is None:
            return [ViewPage("all ranks", [Text("no ranks of this notebook are in a group")])]
        pages = list(_pages(self._before, self._after))
        if sample is not None:
            return pages
        note = Text("the job has ended; this is what its ranks did last", style="bold")
        return [ViewPage(page.name, [note, *page.parts]) for page in pages]

    def _sample(self) -> JobSample | None:
        job = _last_job()
        if job is None:
            return None
        if self._sampler is None or job.pid != self._pid:
            self._sampler, self._pid = JobSampler(job), job.pid
            self._before = self._after = None
        return self._sampler.sample()


def _last_job() -> Job | None:
    pid = os.getpid()
    own = [job for job in find_jobs()[0] if pid in job.pids or job.was_started_by(pid)]
    return own[-1] if own else None


def _pages(before: JobSample | None, after: JobSample) -> Iterator[ViewPage]:
    from rich.text import Text

    groups, head = changes(before, after), Text(f"job {after.pid}", style="bold")
    yield ViewPage("all ranks", [head, *membership_lines(after), *group_tables(groups)])
    pages = [
        (change, local_rank) for change in groups for local_rank in range(len(change.after.record.ranks))
    ]
    for change, local_rank in pages[:_MAX_RANK_PAGES]:
        record = change.after.record
        name = f"rank {record.ranks[local_rank].rank}"
        if len(groups) > 1:
            name += f" of {record.group}"
        yield ViewPage(name, list(rank_page(change, local_rank)))


def as_html(page: ViewPage) -> str:
    """Return a page as HTML."""
    return _printed(page).export_html(inline_styles=True, code_format=_HTML)


def as_text(page: ViewPage) -> str:
    """Return a page as lines of text."""
    return _printed(page).export_text()


def _printed(page: ViewPage) -> Console:
    from rich.console import Console

    # In a kernel, rich would show by itself what is printed.
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
    console.print(*page.parts, sep="\n", highlight=False)
    return console


class LiveView:
    """Shows this process's ranks, anew every second, until it is closed.

    Args:
        output: where; nothing else may show something there.
    """

    def __init__(self, output: ViewOutput) -> None:
        self._output = output
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchestra ranks_top", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the view, which stays as it is."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        job = OwnJob()
        while True:
            self._output.show(job.pages())
            if self._closing.wait(_INTERVAL_S):
                return
