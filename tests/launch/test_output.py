"""Test that what the ranks print reaches the screen in whole lines, whatever they print and whenever."""

from __future__ import annotations

import io
import math

from torchestra.launcher.output import OutputSink, OutputSource, colours_wanted, open_sinks, prefix


class Screen(io.StringIO):
    """A stream without bytes beneath, as a notebook's; a terminal if asked for."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def two_sources(terminal: bool = False) -> tuple[Screen, OutputSource, OutputSource]:
    screen = Screen(terminal)
    sink = OutputSink(screen)
    return screen, OutputSource(sink, b"[a] "), OutputSource(sink, b"[b] ")


def test_lines_are_never_interleaved_however_they_arrive() -> None:
    screen, a, b = two_sources()
    a.feed(b"one, ", 0.0)
    b.feed(b"first\nsecond\nthi", 0.0)
    a.feed(b"still one\ntwo\n", 0.0)
    b.feed(b"rd\n", 0.0)
    assert screen.getvalue() == "[b] first\n[b] second\n[a] one, still one\n[a] two\n[b] third\n"


def test_unfinished_line_is_shown_after_silence_and_goes_on_in_its_place() -> None:
    screen, a, _ = two_sources()
    a.feed(b"name? ", 10.0)
    assert screen.getvalue() == ""
    due = a.due()
    assert 10.0 < due < 11.0
    a.show_unfinished()
    assert screen.getvalue() == "[a] name? "
    assert a.due() == math.inf
    a.feed(b"Bob\n", 12.0)
    assert screen.getvalue() == "[a] name? Bob\n"


def test_a_line_that_keeps_growing_is_shown_though_there_is_no_silence() -> None:
    _, a, _ = two_sources()
    for step in range(100):
        a.feed(b".", step / 100)
    due = a.due()
    assert due <= 0.5


def test_another_rank_ends_an_unfinished_line_first() -> None:
    screen, a, b = two_sources()
    a.feed(b"loading", 0.0)
    a.show_unfinished()
    b.feed(b"hello\n", 0.0)
    a.feed(b" done\n", 0.0)
    assert screen.getvalue() == "[a] loading\n[b] hello\n[a]  done\n"


def test_redrawn_line_is_redrawn_in_place_on_a_terminal() -> None:
    screen, a, _ = two_sources(terminal=True)
    a.feed(b"\r10%\r20%", 0.0)
    a.show_unfinished()
    a.feed(b"\r30%\r100%\n", 0.0)
    assert screen.getvalue() == "[a] 20%\r\x1b[K[a] 100%\n"


def test_redrawn_line_elsewhere_keeps_what_was_shown() -> None:
    screen, a, _ = two_sources()
    a.feed(b"10%\r20%\r", 0.0)
    a.show_unfinished()
    a.feed(b"30%\r100%\r\n", 0.0)
    assert screen.getvalue() == "[a] 20%\n[a] 100%\n"


def test_windows_line_ends_lose_nothing() -> None:
    screen, a, _ = two_sources()
    a.feed(b"one\r\n\r\ntwo\r\n", 0.0)
    assert screen.getvalue() == "[a] one\n[a] \n[a] two\n"


def test_bytes_that_are_no_text_pass() -> None:
    screen, a, _ = two_sources()
    a.feed(b"\xff\xfe caf\xc3", 0.0)
    a.feed(b"\xa9\n", 0.0)
    assert screen.getvalue() == "[a] �� café\n"


def test_one_rank_alone_is_passed_through_untouched() -> None:
    screen = Screen()
    source = OutputSource(OutputSink(screen), prefix(0, 1, coloured=True))
    source.feed(b"\r10%\rno line end", 0.0)
    assert screen.getvalue() == "\r10%\rno line end"


def test_prefixes_align() -> None:
    assert prefix(2, 4, coloured=False) == b"[rank 2] "
    assert prefix(2, 16, coloured=False) == b"[rank  2] "
    assert prefix(12, 16, coloured=False) == b"[rank 12] "
    assert prefix(2, 4, coloured=True) != prefix(3, 4, coloured=True)


def test_one_place_of_output_is_one_device(tmp_path) -> None:
    with open(tmp_path / "log", "w") as out, open(tmp_path / "log", "w") as same:
        first, second = open_sinks(out, same)
    assert first is second
    with open(tmp_path / "log", "w") as out, open(tmp_path / "other", "w") as other:
        first, second = open_sinks(out, other)
    assert first is not second


def test_when_colours_are_wanted(monkeypatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours_wanted(terminal=True)
    assert not colours_wanted(terminal=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert colours_wanted(terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours_wanted(terminal=True)
