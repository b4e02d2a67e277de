"""The pages of ``torchestra top``, its keys, and its files; test_watching.py has it beside jobs that run."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import sqlite3
import struct
import sys
import termios
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_rates import ENTRY, RECEIVE, group, rank

from interrupts import lose_an_interrupt
from torchestra.cli import main
from torchestra.engine.diagnosis import process_counts
from torchestra.engine.diagnosis.facts import to_json
from torchestra.engine.diagnosis.process_counts import ProcessCounts
from torchestra.engine.recorder.flight_entries import ExecutedCalls, HostRecord, RankRecord, Tally
from torchestra.errors import InvalidArgumentError
from torchestra.monitor import top
from torchestra.monitor.live.job_table import group_tables
from torchestra.monitor.live.keyboard import Keyboard
from torchestra.monitor.live.rank_page import rank_page
from torchestra.monitor.live.recording import Recording, RecordingWriter
from torchestra.monitor.live.samples import GroupSample, JobSample, JobSampler, changes
from torchestra.monitor.live.screen import Screen
from torchestra.notebook.live_view import ViewPage, as_html
from torchestra.system.interrupts import Interrupts
from warm_programs import WarmProgram

COUNTS = ProcessCounts(10.0, 1.0, 100, 2, 0, 0, 3_000_000_000, None, 2, 9)


def sample(number: int, *more: GroupSample) -> JobSample:
    """Ranks 0 and 2 wait for rank 1, which moves the most; ``number`` seconds after the first sample."""
    slow = rank(1, 3, operation_bytes=10_000 * number, operations_begun=number, messages=(RECEIVE,))
    tally = Tally("all_reduce", 1 << 16, 4 + number, 40_000, 0.001, 0.0005)
    waits = 0.5 * number
    ranks: list[RankRecord] = [
        rank(0, 3, waited_for=(0.0, waits, 0.0), tallies=(tally,)),
        slow,
        rank(2, 3, waited_for=(0.0, 0.8 * number, 0.0), operations=(replace(ENTRY, number=77),)),
    ]
    process = replace(COUNTS, cpu_s=10.0 + 0.25 * number, minor_faults=100 + 40 * number)
    own = GroupSample(
        "1", group(100.0 + number, *ranks), (True, True, False), ("at train.py:9 in main, 1 s ago", "", ""),
        (process, None, None),
    )  # fmt: skip
    return JobSample(4, "python train.py", 100.0 + number, 1e9 + number, "null", (own, *more))


def text_of(screen: Screen, *samples: JobSample, height: int = 60) -> str:
    console = Console(file=io.StringIO(), width=160)
    before = samples[0] if len(samples) > 1 else None
    console.print(screen.draw(before, samples[-1], height, "sample 2 of 3"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def press(screen: Screen, *keys: str) -> list[str | None]:
    return [screen.press(key) for key in keys]


def test_keys_choose_a_rank_and_show_its_page() -> None:
    screen = Screen(replays=False)
    assert "the others wait for rank 1" in text_of(screen, sample(0), sample(1))
    press(screen, "enter")
    page = text_of(screen, sample(0), sample(1))
    assert "rank 0 (pid 1) of group 'g'" in page
    assert "its program was at train.py:9 in main, 1 s ago" in page
    assert "2 of 9 threads run, 3 GB of memory; main thread 25% on a core, 0% without one" in page
    assert "page faults a second: 40, 0 of them from a disk" in page
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "rank 1 500 ms 50% ██████████" in lines
    assert "all_reduce to 65.5 KB 5 +1 40 KB 200 µs 40 MB/s 50%" in lines
    assert any(line.startswith("5 all_reduce(SUM, float32, 10 elements) done") for line in lines)
    press(screen, "escape", "j", "down", "down", "enter")  # there is none below the last
    assert "rank 2 (pid 1) of group 'g'" in (last := text_of(screen, sample(0), sample(1)))
    assert "has died, in no operation" in last
    assert "77" in last
    press(screen, "k")
    middle = text_of(screen, sample(0), sample(1))
    assert "in recv(float32, from rank 2, 40 bytes) for " in middle
    assert "its process: cannot be read, or has several ranks" in middle


def order(screen: Screen) -> list[str]:
    lines = text_of(screen, sample(0), sample(1)).splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["rank", "pid"])
    return [line.split()[0] for line in lines[head + 1 : head + 4]]


def test_ranks_are_sorted_by_what_is_asked_for() -> None:
    screen = Screen(replays=False)
    found = []
    for _ in range(5):
        found.append("".join(order(screen)))
        press(screen, "s")
    assert found == ["012", "120", "102", "102", "012"]


def test_pause_help_and_quit() -> None:
    screen = Screen(replays=False)
    assert press(screen, "p", "q") == [None, "quit"]
    assert screen.paused
    assert "PAUSED" in text_of(screen, sample(1))
    assert press(screen, "right", "space", "?") == [None, None, None], (
        "a running job cannot be stepped through"
    )
    assert not screen.paused
    assert "sort the ranks by another column: rank, waiting, ops/s, bytes/s" in text_of(screen, sample(1))
    assert press(Screen(replays=True), "right", ".", "left", ",") == ["forward", "forward", "back", "back"]


def test_the_chosen_rank_is_in_sight_where_there_is_little_room() -> None:
    many = replace(sample(0).groups[0], record=group(100.0, *(rank(number, 40) for number in range(40))))
    many = replace(many, alive=(True,) * 40, lines=("",) * 40, processes=(None,) * 40)
    screen = Screen(replays=False)
    whole = replace(sample(0), groups=(many,))
    assert "and 25 more ranks" in text_of(screen, whole, height=24)
    press(screen, *["j"] * 39)
    assert re.search(r"^ +39 ", text_of(screen, whole, height=24), re.MULTILINE)


def test_workers_that_only_call_each_other_are_not_shown_as_idle() -> None:
    def at(number: int) -> JobSample:
        calls = (ExecutedCalls(0, "fetch", 300 * number, 0.3 * number),) if number else ()
        ranks = (
            rank(0, 2, operations=(), calls_made=300 * number, calls_sent_bytes=3000, calls_in_flight=2),
            rank(1, 2, calls=calls, calls_sent_bytes=6_000_000 * number),
        )
        record = replace(group(100.0 + number, *ranks), group="rpc")
        workers = GroupSample("1", record, (True, True), ("", ""), (None, None))
        return replace(sample(number), groups=(workers,))

    screen = Screen(replays=False)
    lines = [" ".join(line.split()) for line in text_of(screen, at(1), at(2)).splitlines()]
    assert "rank pid no. operation for so long calls/s executed/s sent/s waiting for" in lines
    assert "0 1 RPC, waits for 2 calls 300 0 0 B 0%" in lines
    assert "1 1 RPC 0 300 6 MB 0%" in lines
    press(screen, "j", "enter")
    page = [" ".join(line.split()) for line in text_of(screen, at(1), at(2)).splitlines()]
    assert "0 calls by RPC made and 300 executed a second, 6 MB a second sent in calls and answers" in page
    assert "rank 0 fetch 600 +300 1 ms" in page


def test_ranks_of_other_hosts_are_shown_and_hosts_that_do_not_answer_named() -> None:
    def elsewhere(name: str, number: int, answered: bool) -> GroupSample:
        ranks = (rank(number, 5),) if answered else ()
        host = HostRecord(name, (number,), answered)
        record = replace(group(100.0, *ranks), size=5, hosts=(host,))
        return GroupSample(
            f"1 {name}", record, (True,) * len(ranks), ("",) * len(ranks), (None,) * len(ranks)
        )

    screen = Screen(replays=False)
    whole = sample(0, elsewhere("b", 3, answered=True), elsewhere("c", 4, answered=False))
    text = text_of(screen, whole)
    assert "group 'g' on host b, 1 of 5 ranks" in text
    assert "host c, with rank 4 of group 'g', does not answer" in text
    press(screen, "j", "j", "j", "enter")
    page = text_of(screen, whole)
    assert "rank 3 (pid 1) on host b of group 'g'" in page
    assert "its process: cannot be read, or has several ranks" in page


def recorded(path: Path, count: int = 3) -> Path:
    with closing(RecordingWriter(path)) as writer:
        for number in range(count):
            writer.write(sample(number))
    return path


def write_all(writer: RecordingWriter, count: int) -> None:
    for number in range(1, count):
        writer.write(sample(number))


def test_a_disk_that_is_full_ends_the_recording_and_leaves_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "job.top"
    with closing(RecordingWriter(path)) as writer:
        writer._file.execute("PRAGMA max_page_count = 8")
        writer.write(sample(0))
        with pytest.raises(InvalidArgumentError, match=r"no more samples can be written: .*full; --replay"):
            write_all(writer, 10_000)
    with closing(Recording(path)) as file:
        assert file.sample(0) == sample(0)


def test_a_file_has_the_samples_as_they_were(tmp_path: Path) -> None:
    with closing(Recording(recorded(tmp_path / "job.top"))) as file:
        assert file.times == [1e9, 1e9 + 1, 1e9 + 2]
        assert [file.sample(place) for place in (2, 0)] == [sample(2), sample(0)]


def test_a_replay_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recorded(tmp_path / "job.top"))
    assert main(["top", "--replay", path]) == 0
    assert "the others wait for rank 1: 65% of their time" in capsys.readouterr().out
    assert main(["top", "--replay", path, "--json"]) == 0
    assert capsys.readouterr().out.count('"job": 4') == 2


def edited(number: int, **changes: object) -> bytes:
    """A sample whose first group is another, as a file has it."""
    own = replace(sample(number).groups[0], **changes)  # type: ignore[arg-type]
    return zlib.compress(to_json(replace(sample(number), groups=(own,))).encode())


def test_texts_are_shown_as_they_are_and_no_terminal_obeys_them() -> None:
    hostile = "[/red] \x1b[2J<script>"
    calls = (ExecutedCalls(1, hostile, 0, 0.0),)
    ranks = (rank(0, 1, operations=(replace(ENTRY, kind=hostile),), calls=calls),)
    record = replace(group(100.0, *ranks), group=hostile, aborted=hostile)
    own = GroupSample("1", record, (True,), (hostile,), (None,))
    whole, screen = replace(sample(0), command=hostile, groups=(own,)), Screen(replays=False)
    pages = text_of(screen, whole)
    press(screen, "enter")
    pages += text_of(screen, whole)
    assert pages.count("[/red] \\x1b[2J<script>") >= 4
    assert "\x1b" not in pages
    html = as_html(
        ViewPage("all", [*group_tables(changes(whole, whole)), *rank_page(*changes(whole, whole), 0)])
    )
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


@pytest.mark.parametrize("columns", [1, 20])
def test_a_narrow_terminal_is_drawn_on(columns: int) -> None:
    screen = Screen(replays=False)
    for key in ("escape", "enter", "?"):
        press(screen, key)
        console = Console(file=io.StringIO(), width=columns, force_terminal=True)
        console.print(screen.draw(sample(0), sample(1), 5, "sample 2 of 3"))


def damage(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute(statement, values)
        file.commit()


@pytest.mark.parametrize(
    ("statement", "value", "told"),
    [
        ("PRAGMA application_id = 5", None, "torchestra top --record has not written this"),
        ("PRAGMA user_version = 99", None, "the file has version 99, and this torchestra reads 1"),
        ("DELETE FROM samples", None, "there are no samples in it"),
        ("DROP TABLE samples", None, "this is no recording: no such table: samples"),
        ("UPDATE samples SET taken = ?", "soon", "this is no recording: could not convert"),
        ("UPDATE samples SET json = ?", b"nothing", "sample 1 of 3 is damaged"),
        ("UPDATE samples SET json = ?", 5, "sample 1 of 3 is damaged"),
        ("UPDATE samples SET json = ?", zlib.compress(b'{"pid": "x"}'), "sample 1 of 3 is damaged"),
        ("UPDATE samples SET json = ?", zlib.compress(b"[]"), "sample 1 of 3 is damaged"),
        ("UPDATE samples SET json = ?", edited(0, alive=()), "has not as many values as ranks"),
        ("UPDATE samples SET json = ?", edited(0, record=group(1.0, rank(0, 2))), "has not as many values"),
        (
            "UPDATE samples SET json = ?",
            zlib.compress(to_json(replace(sample(0), membership="{")).encode()),
            "damaged",
        ),
        (
            "UPDATE samples SET json = ?",
            zlib.compress(to_json(replace(sample(0), membership="{}")).encode()),
            "damaged",
        ),
    ],
)
def test_a_damaged_file_is_refused(
    statement: str, value: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "job.top")
    damage(path, statement, *([] if value is None else [value]))
    assert main(["top", "--replay", str(path)]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"torchestra top: --replay {path}: ")
    assert told in text


def test_files_that_are_none_and_files_that_are_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, missing = tmp_path / "other", tmp_path / "missing"
    other.write_text("this is a text, and no database " * 100)
    for path, told in ((other, "this is no recording"), (missing, "there is no such file")):
        assert main(["top", "--replay", str(path)]) == 1
        assert told in capsys.readouterr().err
    assert not missing.exists()
    assert main(["top", "--replay", str(other), "--record", str(missing)]) == 1
    assert "--record does not go with --replay" in capsys.readouterr().err
    for path, told in ((other, "the file exists already"), (missing / "x", "the file cannot be written")):
        with pytest.raises(ValueError, match=told):
            RecordingWriter(path)


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal of 120 columns and 40 lines: our end, and the program's."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        yield ours, theirs
    finally:
        os.close(ours)


def test_keys_of_a_terminal_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (ours, theirs), os.fdopen(theirs, "r") as stdin:
        before = termios.tcgetattr(theirs)
        monkeypatch.setattr(sys, "stdin", stdin)
        with Interrupts() as interrupts, Keyboard(interrupts) as keyboard:
            os.write(ours, b"j\x1b[A\x1bOB\r\x1b[5~ \x1b")
            found = [keyboard.read(20.0) for _ in range(7)]
            assert keyboard.read(0.0) is None
        assert termios.tcgetattr(theirs) == before
    assert found == ["j", "up", "down", "enter", "\x1b[5~", "space", "escape"]


def await_text(ours: int, text: str) -> str:
    """Read what is drawn until some text has come; the test's time-out bounds the wait."""
    drawn = b""
    while text.encode() not in drawn:
        drawn += os.read(ours, 1 << 16)
    return drawn.decode(errors="replace")


def test_a_replay_on_a_terminal_obeys_keys(tmp_path: Path) -> None:
    path = recorded(tmp_path / "job.top")
    command = [sys.executable, "-m", "torchestra", "top", "--replay", str(path), "--speed", "1000"]
    with terminal() as (ours, theirs):
        process = WarmProgram(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        with process:
            await_text(ours, "sample 3 of 3")
            os.write(ours, b"\x1b[D")
            assert "sample 2 of 3" in await_text(ours, "PAUSED")
            os.write(ours, b"j\r")
            await_text(ours, "rank 1 (pid 1) of group 'g'")
            os.write(ours, b"q")
            await_text(ours, "\x1b[?1049l")
            assert process.wait() == 0


def test_a_terminal_is_left_as_it_was_found_by_one_that_is_terminated(tmp_path: Path) -> None:
    path = recorded(tmp_path / "job.top")
    command = [sys.executable, "-m", "torchestra", "top", "--replay", str(path), "--speed", "1000"]
    with terminal() as (ours, theirs), os.fdopen(theirs, "r+b", buffering=0) as file:
        before = termios.tcgetattr(file)
        with WarmProgram(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            await_text(ours, "sample 3 of 3")
            assert termios.tcgetattr(file) != before
            process.send_signal(signal.SIGTERM)
            await_text(ours, "\x1b[?1049l")
            assert process.wait() == 128 + signal.SIGTERM
        assert termios.tcgetattr(file) == before


def test_a_terminal_that_cannot_draw_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "job.top")
    command = [sys.executable, "-m", "torchestra", "top", "--replay", str(path)]
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as (ours, theirs):
        process = WarmProgram(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        with process:
            assert "\x1b" not in await_text(ours, "the others wait for rank 1")
            assert process.wait() == 0


def test_a_thread_that_ends_while_a_process_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real, own, end = process_counts.stat_fields, str(os.getpid()), threading.Event()

    def stat(path: Path) -> list[str]:
        if "task" in path.parts and path.name != own:
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(process_counts, "stat_fields", stat)
    other = threading.Thread(target=end.wait)
    other.start()
    assert process_counts.read_process(os.getpid()).all_threads == 1
    end.set()
    other.join()


class Losing(JobSampler):
    """Stand in for a job's samples; at the second one an interrupt is lost."""

    taken = 0

    def __init__(self, _: object) -> None:
        pass

    def sample(self) -> JobSample:
        self.taken += 1
        assert self.taken < 4, "the interrupt was lost"
        if self.taken == 2:
            lose_an_interrupt()
        return sample(self.taken)


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_an_interrupt_amid_a_finalizer_ends_it(monkeypatch: pytest.MonkeyPatch, on_a_terminal: bool) -> None:
    monkeypatch.setattr(top, "JobSampler", Losing)
    monkeypatch.setattr(top, "choose_job", lambda _: None)
    with terminal() as (_, theirs), os.fdopen(theirs, "r+b", buffering=0) as file:
        if on_a_terminal:
            monkeypatch.setattr(sys, "stdin", file)
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, write_through=True))
        assert main(["top", "--interval", "0.05", *([] if on_a_terminal else ["--json"])]) == 0
        if on_a_terminal:
            sys.stdout.detach()  # type: ignore[union-attr]
