"""What ``%ranks_top`` shows; test_ranks_magic.py has it in a kernel of Jupyter."""

from __future__ import annotations

import pytest
import torch
from rich.text import Text

import torchestra as dist
from torchestra.notebook import live_view
from torchestra.notebook.live_view import OwnJob, ViewPage, WidgetOutput, as_html, as_text
from worlds import run


def texts_while_ranks_work_and_after(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    dist.all_reduce(torch.ones(7))
    shown = []
    if dist.get_rank() == 0:
        job = OwnJob()
        shown.append([(page.name, as_text(page)) for page in job.pages()])
        monkeypatch.setattr(live_view, "_last_job", lambda: None)
        shown.append([(page.name, as_text(page)) for page in job.pages()])
    dist.barrier()
    return shown


def test_ranks_that_are_threads_of_the_notebook_are_shown_and_what_they_did_last_stays(monkeypatch) -> None:
    (at_work, after), _ = run("threads", 2, texts_while_ranks_work_and_after, monkeypatch)
    assert at_work[0][0] == "all ranks"
    assert "all_reduce(SUM, float32, 7 elements) done" in at_work[0][1], at_work[0][1]
    assert any(name.startswith("rank 1") for name, _ in at_work)
    assert [name for name, _ in after] == [name for name, _ in at_work]
    assert all(text.startswith("the job has ended") for _, text in after)
    assert "all_reduce(SUM, float32, 7 elements)" in after[0][1]


def test_no_text_of_a_job_is_taken_for_html() -> None:
    page = as_html(ViewPage("all ranks", [Text("<script>x</script>", style="red")]))
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_the_page_that_was_chosen_stays_until_there_are_other_pages(capsys) -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    widget = WidgetOutput()
    widget.show([ViewPage("all ranks", [Text("nothing")])])
    pages = [
        ViewPage("all ranks", [Text("two")]),
        ViewPage("rank 0", [Text("zero")]),
        ViewPage("rank 1", [Text("one")]),
    ]
    widget.show(pages)
    widget._choice.index = 2
    widget.show([*pages[:2], ViewPage("rank 1", [Text("moved on")])])
    assert (widget._choice.index, widget._choice.value) == (2, "rank 1")
    assert "moved on" in widget._pages.children[2].value
    widget.show(pages[:2])
    assert (widget._choice.index, widget._choice.options) == (0, ("all ranks", "rank 0"))
    assert len(widget._pages.children) == 2


def test_pages_that_come_and_go_are_the_same_widgets(capsys) -> None:
    """What is made anew stays in the kernel and in the browser, and groups can come and go for hours."""
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    widget = WidgetOutput()
    ranks = [ViewPage(f"rank {rank}", [Text(str(rank))]) for rank in range(3)]
    widget.show(ranks)
    first = widget._pages.children
    widget.show(ranks[2:])
    widget.show(ranks)
    assert widget._pages.children == first
    assert [">2\n" in page.value for page in first] == [False, False, True]
