"""The ranks' output, line by line, on the launcher's own.

Lines are whole: no rank's line is cut by another's. An unfinished line (a prompt, a progress bar) is shown
once its rank has been silent for a moment, or has left it unfinished for long; if another source prints
meanwhile, the line is ended, and continues under a new prefix. A progress bar that redraws its line with a
carriage return is redrawn in place on a terminal; in a file only its last state, at each such moment, is
kept. Bytes are passed on unchanged, so no encoding can fail.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
from typing import Protocol, TextIO

_SILENCE_S = 0.2
_LONGEST_DELAY_S = 0.5
_LONGEST_LINE = 1 << 20
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_ERASE_TO_END = b"\x1b[K"


class _Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


class _AsText:
    """An adapter that writes bytes to a text stream without a byte buffer (a notebook's, a test's)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, /) -> object:
        return self._stream.write(self._decoder.decode(data))

    def flush(self) -> object:
        return self._stream.flush()


class OutputSink:
    """A destination of output, which knows the source that has left its line unfinished there."""

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream.isatty()
        self.open_line: OutputSource | None = None
        self._out: _Writable = getattr(stream, "buffer", None) or _AsText(stream)

    def write(self, data: bytes) -> None:
        """Write and flush.

        Raises:
            BrokenPipeError: the reader of the output is gone.
        """
        self._out.write(data)
        self._out.flush()

    def say(self, text: str) -> None:
        """Write the launcher's own lines."""
        self.end_line()
        self.write(text.encode(errors="replace"))

    def end_line(self) -> None:
        """Begin a new line if a source has left one unfinished."""
        if self.open_line is not None:
            self.open_line = None
            self.write(b"\n")


def open_sinks(stdout: TextIO, stderr: TextIO) -> tuple[OutputSink, OutputSink]:
    """Return the sinks of two streams: the same one where both lead to the same terminal or file."""
    out = OutputSink(stdout)
    stdout.flush()
    same = stdout is stderr
    # Other streams, such as a notebook's, may show output anywhere, whatever their file descriptors are.
    if hasattr(stdout, "buffer") and hasattr(stderr, "buffer"):
        with contextlib.suppress(OSError, ValueError):
            same = os.path.sameopenfile(stdout.fileno(), stderr.fileno())
    return (out, out) if same else (out, OutputSink(stderr))


def colours_wanted(terminal: bool) -> bool:
    """Return whether to colour: on a terminal unless TERM=dumb, or with FORCE_COLOR; never with NO_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (terminal and os.environ.get("TERM") != "dumb")


def prefix(rank: int, nproc: int, coloured: bool) -> bytes:
    """Return the prefix of each line of a rank; empty if the rank is alone."""
    if nproc == 1:
        return b""
    label = f"[rank {rank:>{len(str(nproc - 1))}}]"
    if coloured:
        label = f"\x1b[0;{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
    return label.encode() + b" "


class OutputSource:
    """One output stream of one rank, connected to a sink."""

    def __init__(self, sink: OutputSink, prefix: bytes) -> None:
        self._sink = sink
        self._prefix = prefix
        self._pending = b""
        self._pending_since = 0.0
        self._last_heard = 0.0

    def feed(self, data: bytes, now: float) -> None:
        """Accept a rank's output; show every line that is now whole."""
        if not self._prefix:
            self._sink.write(data)
            return
        *lines, rest = (self._pending + data).split(b"\n")
        if lines or not self._pending:
            self._pending_since = now
        self._last_heard = now
        self._pending = rest
        if lines:
            self._sink.write(b"".join(self._compose(line.rstrip(b"\r"), b"\n") for line in lines))
        if len(rest) > _LONGEST_LINE:
            self.show_unfinished()

    def due(self) -> float:
        """Return when :meth:`show_unfinished` is due: infinity while there is nothing to show."""
        if not self._pending.strip(b"\r"):
            return math.inf
        return min(self._last_heard + _SILENCE_S, self._pending_since + _LONGEST_DELAY_S)

    def show_unfinished(self) -> None:
        """Show the part of an unfinished line that the rank has written."""
        text = self._pending.rstrip(b"\r")
        if text:
            self._pending = self._pending[len(text) :][:1]
            self._sink.write(self._compose(text, b""))

    def _compose(self, text: bytes, ending: bytes) -> bytes:
        """Return the bytes that show ``text`` (of one line) wherever the sink's last line stands."""
        _, redraw, last = text.rpartition(b"\r")
        open_line, self._sink.open_line = self._sink.open_line, None if ending else self
        if open_line is self and not redraw:
            return last + ending
        if open_line is self and self._sink.terminal:
            return b"\r" + _ERASE_TO_END + self._prefix + last + ending
        return (b"\n" if open_line is not None else b"") + self._prefix + last + ending
