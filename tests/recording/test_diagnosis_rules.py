"""The rules of the diagnosis, each on facts that are made up; and what finds out some of these facts."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from logging import StreamHandler
from pathlib import Path
from typing import Any

import pytest

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import (
    Call,
    GroupWait,
    LockWait,
    PastMessage,
    PendingMessage,
    Process,
    Program,
    RankFacts,
    UserFrame,
    from_json,
    to_json,
)
from torchestra.engine.diagnosis.program import describe_programs
from torchestra.engine.diagnosis.rules import KINDS, diagnose
from torchestra.engine.diagnosis.source_lines import acquired_at, held_at, loops_at
from torchestra.engine.diagnosis.stack_dump import parse
from torchestra.engine.failure.stack_reporter import answer_text
from torchestra.engine.recorder.callsites import is_line_of_the_program

CALL = "all_reduce(SUM, float32, 3 elements)"
TRAIN = UserFrame("train.py", 12, "train", 5, ((10, 14),))
AT = "at train.py:30 in load"


def frame(line: int, function: str = "load", loops: tuple[tuple[int, int], ...] = ()) -> UserFrame:
    return UserFrame("train.py", line, function, 5 if function == "train" else 25, loops)


def program(*frames: UserFrame, inside: str = "", **facts: object) -> Program:
    return Program(f"is at {frames[0]}" if frames else "has ended", frames, inside, **facts)  # type: ignore[arg-type]


WAITS = RankFacts(
    0, process="a", call=Call(7, CALL, "running", 5.0, (CALL,)), program=program(TRAIN, inside="finish")
)
LATE = RankFacts(1, process="b", call=Call(6, CALL, "done", 5.0, (CALL,)), program=program(frame(30)))
NO_ANSWER = replace(LATE, program=None)
SLEEPS = Process(0.2)
GIL = Process(0.2, ready=0.9, cpu=0.2, in_futex=True, reporter_sleeps=True)


def in_message(facts: RankFacts, kind: str, peer: int) -> RankFacts:
    text = f"{kind}(float32, {'to' if kind == 'send' else 'from'} rank {peer}, 4 bytes)"
    message = PendingMessage(kind, peer, 0, text, 5.0)
    return replace(facts, call=replace(facts.call, state="done"), message=message)  # type: ignore[type-var]


def past(kind: str, peer: int, tag: int, ago: float) -> PastMessage:
    return PastMessage(kind, peer, tag, f"{kind}({tag})", ago, ago)


def in_group(facts: RankFacts, group: str, missing: str) -> RankFacts:
    waits = (GroupWait(group, "barrier()", (missing,)),)
    return replace(facts, program=replace(facts.program, inside="barrier", groups=waits))  # type: ignore[type-var]


def late(**facts: object) -> RankFacts:
    return replace(LATE, program=replace(LATE.program, **facts))  # type: ignore[type-var]


CASES = [
    (
        [WAITS, replace(LATE, presence="dead", end_reason="exit code 3")],
        "killed process: rank 1 has died (exit code 3)",
    ),
    (
        [WAITS, RankFacts(1, "h1", presence="silent", last_seen=AT)],
        f"(likely): killed host: host h1 with rank 1 does not answer: it is down, or"
        f" the network to it is; rank 1"
        f" on host h1 was {AT}; rank 0 waits at train.py:12 in train",
    ),
    (
        [
            WAITS,
            *(RankFacts(rank, "h1", global_rank=rank + 3, presence="silent") for rank in (1, 2)),
        ],
        "(likely): killed host: host h1 with ranks 1, 2 (global ranks 4, 5) does not answer: it is down, or"
        " the network to it is; rank 0 waits at train.py:12 in train",
    ),
    (
        [WAITS, replace(NO_ANSWER, system=replace(SLEEPS, stopped=True), last_seen=f"{AT}, 0.5 s ago")],
        f"stopped process: rank 1 is stopped, by SIGSTOP, Ctrl-Z or a debugger, last seen {AT}, 0.5 s ago",
    ),
    (
        [WAITS, in_group(LATE, "pairs", "a")],
        f"wrong order of groups: rank 0 is in operation 7, {CALL}, at train.py:12 in train; rank 1 is in"
        f" barrier() of group 'pairs' {AT}",
    ),
    (
        [in_message(WAITS, "recv", 1), in_message(LATE, "recv", 0)],
        "swapped send and recv: rank 0 waits in recv(float32, from rank 1, 4 bytes) at"
        " train.py:12 in train; rank"
        f" 1 waits in recv(float32, from rank 0, 4 bytes) {AT}: each waits for the"
        f" other before it does what the"
        " other waits for",
    ),
    (
        [WAITS, in_message(LATE, "recv", 0)],
        f"mismatch: rank 1 is in recv(float32, from rank 0, 4 bytes) {AT}; rank 0 is in operation 7, {CALL},"
        " at train.py:12 in train",
    ),
    (
        [WAITS, late(lock=LockWait("b", "train.py:30 in load", "loader", "loader.py:3 in run", closed=True))],
        "deadlock on a Python lock: rank 1 waits for lock `b` at train.py:30 in load;"
        " thread 'loader' holds it, at"
        " loader.py:3 in run, and waits for one that the former holds",
    ),
    (
        [WAITS, late(lock=LockWait("", "train.py:30 in load", "t", "io.py:3 in f", True, "", "b"))],
        "deadlock on a Python lock: rank 1 waits for the end of thread 't' at train.py:30 in load; that is at"
        " io.py:3 in f, and waits for lock `b`, which the former holds",
    ),
    (
        [WAITS, late(lock=LockWait("b", "train.py:30 in load", "loader", "loader.py:3 in run"))],
        "waits for a Python lock: rank 1 waits for lock `b` at train.py:30 in load;"
        " thread 'loader' holds it, at"
        " loader.py:3 in run",
    ),
    (
        [WAITS, late(exception="OSError: no file, raised at train.py:28 in load")],
        f"exception swallowed: rank 1 goes on after OSError: no file, raised at"
        f" train.py:28 in load; it is {AT}",
    ),
    (
        [WAITS, replace(LATE, failed_message="recv(float32, from rank 0, 4 bytes)")],
        f"exception swallowed: rank 1 goes on after its recv(float32, from rank 0, 4"
        f" bytes) failed; it is {AT}",
    ),
    (
        [WAITS, replace(LATE, program=program(frame(18, "train")))],
        f"(likely): uneven data: rank 1 has left the loop at train.py:10, in which rank"
        f" 0 still calls {CALL}; it is"
        " at train.py:18 in train",
    ),
    (
        [WAITS, replace(LATE, presence="left", program=None)],
        f"(likely): uneven data: rank 1 has left the loop at train.py:10, in which rank"
        f" 0 still calls {CALL}; it has"
        " destroyed the group",
    ),
    (
        [WAITS, replace(LATE, system=replace(SLEEPS, major_faults=300.0, swapped_bytes=5 << 20))],
        f"swap: rank 1 waits for its memory to be read from disk, 300 pages per second;"
        f" it is {AT}; 5 MiB of it are"
        " in swap",
    ),
    (
        [WAITS, replace(LATE, system=replace(SLEEPS, throttled=0.75))],
        "throttled: rank 1 may not use the processor for 75% of the time (the limit of"
        " its control group); it is"
        f" {AT}",
    ),
    (
        [WAITS, replace(LATE, system=replace(SLEEPS, loader_disk=0.8))],
        f"(likely): slow disk: rank 1 has a child process that waits for a disk, 80% of the time; it is {AT}",
    ),
    (
        [WAITS, replace(LATE, system=replace(SLEEPS, thread_disk=0.8))],
        f"(likely): slow disk: rank 1 has a thread that waits for a disk, 80% of the time; it is {AT}",
    ),
    (
        [WAITS, replace(NO_ANSWER, stack=(frame(30),), other_stacks=(frame(8, "hold"),), system=GIL)],
        "GIL held: rank 1 does not answer, as another thread than its program's holds the interpreter's lock,"
        f" and computes; it is {AT}; other threads are at train.py:8 in hold",
    ),
    (
        [
            WAITS,
            replace(NO_ANSWER, stack=(frame(30),), system=replace(SLEEPS, cpu=1.0, reporter_sleeps=True)),
        ],
        "GIL held: rank 1 does not answer, as a call that does not release it holds the"
        " interpreter's lock, and"
        f" computes with 1.0 cores; it is {AT}",
    ),
    (
        [WAITS, replace(LATE, system=replace(SLEEPS, cpu=0.98))],
        f"missing rank: rank 1 has not called operation 7, {CALL}: it is {AT}, and computes (98% of a core)",
    ),
    (
        [WAITS, replace(LATE, system=replace(SLEEPS, cpu=0.04, ready=0.9))],
        f"missing rank: rank 1 has not called operation 7, {CALL}: it is {AT}, and computes, as far as it"
        " gets a core (4% of a core)",
    ),
    (
        [WAITS, in_group(LATE, "pairs", "elsewhere")],
        f"missing rank: rank 1 has not called operation 7, {CALL}: it is {AT}, in barrier() of group 'pairs',"
        " for ranks that are not in this group",
    ),
    (
        [in_message(WAITS, "recv", 1), LATE],
        "missing rank: rank 1 has not sent what rank 0 waits for in recv(float32, from rank 1, 4 bytes) at"
        f" train.py:12 in train: it is {AT}",
    ),
    (
        [
            replace(
                in_message(WAITS, "recv", 1), messages=(past("recv", 1, 5, 3.0), past("send", 1, 5, 4.0))
            ),
            replace(in_message(LATE, "recv", 0), messages=(past("recv", 0, 5, 5.0),)),
        ],
        f"(likely): mismatch: rank 1 waits in recv(float32, from rank 0, 4 bytes) {AT}, and has not received"
        " what rank 0 sent it with another tag, send(5); rank 0 is at train.py:12 in train",
    ),
    (
        [WAITS, replace(WAITS, rank=2), RankFacts(1, presence="absent")],
        f"missing rank: rank 1 has not come to the group, and not called operation 7, {CALL}; rank 0 waits at"
        " train.py:12 in train",
    ),
    (
        [WAITS, NO_ANSWER],
        f"(likely): unknown: rank 1 has not called operation 7, {CALL}, and does not"
        f" say why; it was at an unknown"
        " line",
    ),
    (
        [WAITS, replace(WAITS, rank=1, program=None, system=replace(SLEEPS, stopped=True), last_seen=AT)],
        f"stopped process: rank 1 is stopped, by SIGSTOP, Ctrl-Z or a debugger, last seen {AT}",
    ),
    (
        [
            replace(WAITS, call=replace(WAITS.call, waits_for=1)),  # type: ignore[type-var]
            replace(WAITS, rank=1, call=replace(WAITS.call, waits_for=0)),  # type: ignore[type-var]
            replace(WAITS, rank=2, host="h1"),
            replace(LATE, rank=3, call=replace(WAITS.call, state="done")),  # type: ignore[type-var]
        ],
        f"(likely): stalled operation: all ranks have called operation 7, {CALL}, and it does not end:"
        " rank 0: in it, waits for rank 1; rank 1: in it, waits for rank 0; rank 2: in it, waits for ranks of"
        f" other hosts, or none; rank 3: through with it, {AT}",
    ),
    ([WAITS], "(likely): unknown: no rank is missing, and rank 0 waits at train.py:12 in train"),
]


@pytest.mark.parametrize(
    ("facts", "line"), CASES, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_each_rule(facts: list[RankFacts], line: str) -> None:
    head = "diagnosis " if line.startswith("(") else "diagnosis: "
    assert str(diagnose(facts, 0)) == head + line


def test_every_kind_has_a_case() -> None:
    assert {diagnose(facts, 0).kind for facts, _ in CASES} == set(KINDS)


def test_the_culprit_is_at_the_end_of_the_chain() -> None:
    """Rank 0 waits for rank 1, which waits for a message of rank 2, which computes."""
    third = replace(LATE, rank=2, process="c", program=program(frame(40, "validate")))
    found = diagnose([replace(WAITS), in_message(LATE, "recv", 2), third], 0)
    assert (found.kind, found.ranks) == ("missing rank", (2,))


def test_a_program_that_has_ended() -> None:
    first = replace(LATE, call=None, program=Program("has ended"))
    assert str(diagnose([WAITS, first], 0)).endswith(
        f"rank 1 has not called operation 7, {CALL}: it has ended"
    )


def test_branches_are_not_uneven_data() -> None:
    """A rank in the other branch has never called what the others wait in, or is in the same call."""
    elsewhere = program(frame(18, "train"))
    other = replace(LATE, call=Call(6, "barrier()", "done", 5.0, ("barrier()",)), program=elsewhere)
    assert diagnose([WAITS, other], 0).kind == "missing rank"
    same = replace(LATE, program=program(frame(30), TRAIN))
    assert diagnose([WAITS, same], 0).kind == "missing rank"


def test_an_exception_that_all_ranks_handle_is_no_reason() -> None:
    text = "ImportError: no module, raised at train.py:1 in <module>"
    waits = replace(WAITS, program=replace(WAITS.program, exception=text))  # type: ignore[type-var]
    assert diagnose([waits, late(exception=text)], 0).kind == "missing rank"


def test_facts_go_from_process_to_process() -> None:
    whole = replace(
        in_group(LATE, "g", "a"), system=SLEEPS, stack=(TRAIN,), message=in_message(LATE, "recv", 0).message
    )
    assert from_json(RankFacts, to_json(whole)) == whole


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"rank": "1"}', '{"rank": 1, "stack": [3]}', '{"rank": 1, "presence": "x"}']
)
def test_what_is_no_fact_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json(RankFacts, text)


def test_a_long_answer_loses_its_end() -> None:
    long = program(*[frame(line, "f" * 700) for line in range(8)])
    cut = from_json(Program, answer_text(long))
    assert 1 <= len(cut.frames) < 8
    assert (cut.location, cut.frames) == (long.location, long.frames[: len(cut.frames)])
    assert len(answer_text(Program("é" * 5000)).encode()) <= at.ANSWER_BYTES


DUMP = f"""\
Thread 0x00007fca62f956c0 (most recent call first):
  File "{os.__file__}", line 12 in g
  File "loader.py", line 7 in read

Current thread 0x00007fca63c49b80 (most recent call first):
  File "train.py", line 10 in f
  File "train.py", line 14 in <module>
"""


def test_what_faulthandler_wrote_is_read() -> None:
    assert parse(DUMP, 0x7FCA63C49B80) == [
        (False, (UserFrame("loader.py", 7, "read"),)),
        (True, (UserFrame("train.py", 10, "f"), UserFrame("train.py", 14, "<module>"))),
    ]
    assert parse("", 1) == []


SOURCE = """\
def train(lock, other):
    for epoch in range(3):
        with lock, other as held:
            while True:
                step(
                    held)
    lock.acquire()
    other.acquire()
    other.release()
    step()
    for each in held:
        def later():
            step()
"""


def test_lines_of_the_source(tmp_path: Path) -> None:
    file = str(tmp_path / "train.py")
    Path(file).write_text(SOURCE)
    assert loops_at(file, 6) == ((4, 6), (2, 6))
    assert loops_at(file, 7) == loops_at(file, 13) == ()
    assert [each.id for each in acquired_at(file, 3, None)] == ["lock", "other"]  # type: ignore[attr-defined]
    assert [each.id for each in acquired_at(file, 3, (3, 3, 19, 24))] == ["other"]  # type: ignore[attr-defined]
    assert [each.id for each in held_at(file, 5)] == ["lock", "other"]  # type: ignore[attr-defined]
    assert [each.id for each in held_at(file, 10)] == ["lock"]  # type: ignore[attr-defined]
    assert loops_at(str(tmp_path / "none.py"), 1) == ()


class Box:
    """Something with locks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table = [threading.RLock()]


@pytest.mark.parametrize("name", ["box.lock", "box.table[0]", "condition", "semaphore", "StreamHandler.lock"])
def test_a_lock_that_is_waited_for_is_named(name: str) -> None:
    """Of all kinds, whoever holds it: here the thread of the test."""
    box, condition, semaphore, handler = Box(), threading.Condition(), threading.Semaphore(), StreamHandler()
    held: dict[str, Any] = {
        "box.lock": box.lock,
        "box.table[0]": box.table[0],
        "condition": condition,
        "semaphore": semaphore,
        "StreamHandler.lock": handler.lock,
    }

    def body() -> None:
        if name == "box.lock":
            with box.lock:
                pass
        elif name == "condition":
            with condition:
                pass
        elif name == "semaphore":
            with semaphore:
                pass
        elif name == "StreamHandler.lock":
            handler.flush()
        else:
            box.table[0].acquire()
            box.table[0].release()

    thread = threading.Thread(target=body, name="waiter")
    with held[name]:
        thread.start()
        wait = None
        while wait is None:
            wait = describe_programs([thread])[0].lock
    thread.join()
    assert wait.lock == name
    assert wait.site.startswith(f"{__file__}:")
    assert not wait.closed
    if name not in ("box.lock", "semaphore"):  # an RLock tells its owner
        assert wait.holder == threading.current_thread().name


def test_a_thread_that_enters_a_lock_on_one_line_does_not_hold_it() -> None:
    """Nor does what was acquired before on the same line escape."""
    lock, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    # fmt: off
    def hold() -> None:
        lock.acquire(); both.wait(); other.acquire()  # noqa: E702

    def enter() -> None:
        with lock: pass  # noqa: E701
    # fmt: on

    with other:
        threads = [threading.Thread(target=body, name=body.__name__, daemon=True) for body in (hold, enter)]
        threads[0].start()
        both.wait()
        threads[1].start()
        while (wait := describe_programs(threads)[1].lock) is None or not wait.holder:
            pass
    assert (wait.lock, wait.holder) == ("lock", "hold")
    lock.release()
    for thread in threads:
        thread.join()


def test_packages_are_of_the_program_wherever_python_has_them() -> None:
    library = os.path.dirname(threading.__file__)
    assert not is_line_of_the_program(f"{library}/threading.py")
    assert is_line_of_the_program(f"{library}/site-packages/trainer/loop.py")


def test_a_thread_that_locks_twice_is_found() -> None:
    lock = threading.Lock()

    def body() -> None:
        with lock:
            lock.acquire()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    while (wait := describe_programs([thread])[0].lock) is None:
        pass
    assert wait.closed
    assert wait.holder == thread.name
    lock.release()
    thread.join()
