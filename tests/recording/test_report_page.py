"""The page of a report: in a browser it shows all that was found, and it asks for nothing."""

from __future__ import annotations

import builtins
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_report_analysis import CALLS, row, sample, span, table

from torchestra.errors import DistError
from torchestra.monitor.analysis.summary import analyse, sentences
from torchestra.monitor.report_page import write_page

BROWSER = Path(__file__).with_name("browser.py")
HANGS = [("default", "diagnosis: missing rank: rank 2 has not called operation 7 <of 9>")]
HOSTILE = "<script>document.title = 'owned';</script>.py:1 in f"


def training() -> Any:
    """Three steps of three ranks; rank 1 is late to each, so that the others wait for it."""
    rows, spans = [], []
    for step in range(1, 4):
        now = 100.0 * step
        for rank in range(3):
            late = 30.0 if rank == 1 else 0.0
            spans += [span(rank, "forward", step, now, now + 20 + late)]
            spans += [span(rank, "backward", step, now + 20 + late, now + 80)]
            spans += [span(rank, "bucket", step, now + 40 + late / 2, now + 75, index=0)]
            spans += [span(rank, "wait", step, now + 72, now + 80)]
            rows.append(
                row(rank, step, now + 41 + late, 35 - late, 30 - late, waited_for=1 if late == 0 else None)
            )
    samples = [sample(rank, at, site=HOSTILE, cpu_s=0.3 * at) for at in (0.0, 1.0) for rank in range(3)]
    return table(rows, spans, samples)._replace(calls=tuple(CALLS))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Image.Image]:
    pytest.importorskip("bokeh", reason="bokeh draws the page")
    if importlib.util.find_spec("PyQt6") is None:
        pytest.skip("PyQt6-WebEngine, the browser, is not installed")
    folder = tmp_path_factory.mktemp("page")
    page, picture = folder / "report.html", folder / "report.png"
    write_page(page, analyse(training()), {1000: 5e9, 1 << 20: 6e9}, HANGS)
    command = [sys.executable, str(BROWSER), str(page), str(picture), "1000"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    if "error while loading shared libraries" in ended.stderr or "cannot open shared object" in ended.stderr:
        pytest.skip(f"the browser lacks a library of the system: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    with Image.open(picture) as image:
        return json.loads(ended.stdout.splitlines()[-1]), image.convert("RGB")


def test_a_browser_shows_the_sentences_and_every_chart(shown: tuple[dict[str, Any], Image.Image]) -> None:
    found, picture = shown
    (analysis,) = analyse(training())
    assert found["items"][0] == f"group 'default': {HANGS[0][1]}", "a hang is the first sentence"
    assert found["items"][1:] == sentences(analysis, {1000: 5e9, 1 << 20: 6e9})
    assert found["items"][1].startswith(
        "Rank 1 is 2.5 times as slow as the others in forward (50 ms against 20 ms)"
    )
    assert found["titles"] == [
        "Timeline",
        "Who waited for whom",
        "Where the time went",
        "The ranks' own work",
        "Who came late",
        "Bandwidth",
        "Communication behind compute",
        "Buckets of the last step",
        "RPC calls",
        "The ranks' processes",
    ]
    assert found["charts"] == len(found["titles"]) - 1
    pixels = {colour: count for count, colour in picture.getcolors(1 << 24) or ()}
    for name, colour in {
        "all_reduce": (0x4E, 0x79, 0xA7),
        "time spent waiting": (0xD9, 0x53, 0x4F),
        "forward": (0xB6, 0xD7, 0xA8),
        "hidden communication": (0x8F, 0xBC, 0x8F),
    }.items():
        assert pixels.get(colour, 0) > 300, f"{name} was not drawn"


def test_the_page_loads_nothing_and_runs_no_text_of_the_record(
    shown: tuple[dict[str, Any], Image.Image],
) -> None:
    found, _ = shown
    assert found["requests"] == []
    assert found["complaints"] == []
    assert found["page_title"] == "torchestra: report"


def test_without_bokeh_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "bokeh":
            raise ImportError(name)
        return usual(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(DistError, match=r"pip install 'torchestra\[report\]'"):
        write_page(tmp_path / "x.html", [], None)
    assert list(tmp_path.iterdir()) == []
