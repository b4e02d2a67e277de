"""One rank's place in the arena: how a group is aborted, and how ranks know of each other's end and place."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import _pytest
import pluggy
import pytest
import torch

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.program import describe_programs
from torchestra.engine.failure import collecting, liveness
from torchestra.engine.failure.hang_report import host_report
from torchestra.engine.failure.liveness import PeerProcesses, PeerThreads
from torchestra.engine.failure.mismatches import call_of, tell_call
from torchestra.engine.failure.stack_reporter import StackReporter
from torchestra.engine.kernels import shared_words
from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.membership import rank_context
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.recorder import callsites
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import DistBackendError, GroupAbortedError, RankFailedError

SOON = 60.0


@pytest.fixture
def contexts() -> tuple[RankContext, RankContext]:
    arena, descriptor = Arena.create(layout_for(2), "pair")
    os.close(descriptor)
    zero, one = (RankContext(arena, rank, "pair", SpinPolicy(0, 0)) for rank in range(2))
    return zero, one


# -- aborting


def test_all_ranks_are_told_the_reason_of_who_aborted_first(
    contexts: tuple[RankContext, RankContext],
) -> None:
    zero, one = contexts
    zero.abort("it was over", failed=(1,))
    one.abort("too late to say this")
    for context in contexts:
        assert context.is_aborted
        error = context.aborted()
        assert isinstance(error, RankFailedError)
        assert error.ranks == (1,)
        assert str(error) == f"rank {context.rank}: group 'pair' can no longer be used: it was over"
        assert context.aborted() is not error


@pytest.mark.parametrize("letter", ["x", "é", "試", "\\", '"', "\n", "\U0001f525"])
def test_a_long_reason_is_cut(contexts: tuple[RankContext, RankContext], letter: str) -> None:
    zero, one = contexts
    zero.abort("because " + letter * 70_000, failed=tuple(range(64)))
    error = one.aborted()
    assert isinstance(error, RankFailedError)
    assert error.ranks == tuple(range(64))
    assert f"because {letter * 100}" in str(error)
    assert str(error).endswith(f"{letter} ...")


def test_if_a_rank_dies_before_it_says_why_another_says_what_it_saw(
    contexts: tuple[RankContext, RankContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_context, "_CLAIM_SECONDS", 0.2)
    zero, _ = contexts
    assert (
        shared_words.compare_exchange(zero.arena.address + at.HEADER_ABORT_CLAIM, 0, 1) == 0
    )  # and no more comes
    zero.abort("what rank 0 saw", failed=(1,))
    for context in contexts:
        error = context.aborted()
        assert isinstance(error, RankFailedError)
        assert error.ranks == (1,)
        assert "what rank 0 saw" in str(error)


def test_a_rank_that_dies_while_it_writes_why_does_not_stop_the_others(
    contexts: tuple[RankContext, RankContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_context, "_CLAIM_SECONDS", 0.2)
    zero, one = contexts
    zero.arena.store_word(at.HEADER_ABORT_CLAIM, at.ABORT_WRITTEN)  # and no more comes
    zero.abort("what rank 0 saw", failed=(1,))
    assert "what rank 0 saw" in str(zero.aborted())
    assert isinstance(one.aborted(), GroupAbortedError)
    assert "a rank died, or was interrupted, before it had said why" in str(one.aborted())


def test_a_rank_that_is_interrupted_while_it_finds_out_where_all_stand_tells_the_others_at_once(
    contexts: tuple[RankContext, RankContext],
) -> None:
    def explain() -> str:
        raise KeyboardInterrupt

    zero, one = contexts
    with pytest.raises(KeyboardInterrupt):
        zero.abort("what rank 0 saw", explain=explain)
    assert one.is_aborted
    assert str(one.aborted()).endswith("what rank 0 saw")


def test_a_rank_that_explains_for_too_long_says_in_the_end_what_the_others_have_said(
    contexts: tuple[RankContext, RankContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks other hosts, say, or its process hardly gets the processor."""
    monkeypatch.setattr(rank_context, "_CLAIM_SECONDS", 0.2)
    zero, one = contexts
    told: list[str] = []
    zero.when_aborted = lambda why, failed, report: told.append(why)
    one.when_aborted = lambda why, failed, report: told.append(why)
    asked, other_is_done = threading.Event(), threading.Event()

    def explain() -> str:
        asked.set()
        assert other_is_done.wait(SOON)
        return "where all stand"

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(zero.abort, "what rank 0 saw", (), explain)
        assert asked.wait(SOON)
        one.abort("what rank 1 saw", failed=(0,))
        other_is_done.set()
        first.result(SOON)
    for context in contexts:
        error = context.aborted()
        assert isinstance(error, RankFailedError)
        assert error.ranks == (0,)
        assert "what rank 1 saw" in str(error)
    assert told == ["what rank 1 saw"], "one rank tells the other hosts"


def test_a_rank_that_takes_its_time_to_say_why_is_waited_for(
    contexts: tuple[RankContext, RankContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_context, "_CLAIM_SECONDS", SOON)
    zero, one = contexts
    asked, told = threading.Event(), threading.Event()
    set_text = zero.arena.set_text

    def set_text_slowly(offset: int, limit: int, text: str) -> int:
        asked.set()
        time.sleep(0.1)
        assert not told.is_set()
        return set_text(offset, limit, text)

    zero.arena.set_text = set_text_slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(zero.abort, "the first reason")
        assert asked.wait(SOON)
        one.abort("the second reason")
        told.set()
        assert "the first reason" in str(one.aborted())
        first.result(SOON)


def test_two_ranks_that_abort_at_once_agree_about_the_reason() -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            arena, descriptor = Arena.create(at.Layout(2, 4096, 4096, 0, 4096), "pair")
            os.close(descriptor)
            pair = [RankContext(arena, rank, "pair", SpinPolicy(0, 0)) for rank in range(2)]
            start = threading.Barrier(2)

            def abort(context: RankContext, start: threading.Barrier = start) -> str:
                start.wait(SOON)
                context.abort(f"rank {context.rank} has had enough")
                return str(context.aborted()).partition(": ")[2]

            assert len(set(pool.map(abort, pair))) == 1


# -- attaching


def test_an_arena_of_other_dimensions_is_refused() -> None:
    layout = at.Layout(2, 12288, 4096, 0, 4096)
    _, descriptor = Arena.create(layout, "pair")
    try:
        with pytest.raises(DistBackendError, match="do all ranks run the same version of torchestra"):
            Arena.attach(descriptor, at.Layout(3, 4096, 4096, 0, 4096))
        with pytest.raises(DistBackendError, match=r"in word \d+ of its header, expected \d+: do all ranks"):
            Arena.attach(descriptor, at.Layout(2, 0, 12288, 0, 4096))
        assert Arena.attach(descriptor, layout).load_word(at.HEADER_MAGIC) == at.MAGIC
    finally:
        os.close(descriptor)


# -- who lives


def child(arena: Arena, rank: int, *, leaves: bool = False) -> int:
    """A process that is a rank until a signal ends it."""
    pid = os.fork()
    if pid == 0:
        # Whatever the tests before have left: a signal must end this process, not raise in a copy of pytest.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            context = RankContext(arena, rank, "group", SpinPolicy(0, 0))
            context.announce()
            if leaves:
                context.leave()
                os.close(arena.descriptor)
            signal.pause()
        finally:
            os._exit(0)
    wanted = at.LEFT if leaves else at.PRESENT
    deadline = time.monotonic() + SOON
    while arena.load_word(arena.control(rank) + at.STATE) != wanted or arena.is_held(rank) == leaves:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return pid


@contextlib.contextmanager
def peers_of(arena: Arena) -> Iterator[PeerProcesses]:
    peers = PeerProcesses(arena, own=0)
    try:
        yield peers
    finally:
        peers.close()


def arena_for(size: int) -> Arena:
    arena, descriptor = Arena.create(at.Layout(size, 4096, 4096, 0, 4096), "group")
    os.close(descriptor)
    return arena


def test_a_process_that_ends_is_seen_whoever_reaps_it() -> None:
    arena = arena_for(4)  # rank 3 has not come
    pids = [child(arena, rank) for rank in (1, 2)]
    with peers_of(arena) as peers:
        assert peers.dead() == ()
        os.kill(pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)  # not reaped yet
        assert peers.dead(now=True) == (1,)
        assert peers.end_reason(1) == "killed by SIGKILL"
        os.waitpid(pids[0], 0)
        os.kill(pids[1], signal.SIGTERM)
        os.waitpid(pids[1], 0)
        assert peers.dead(now=True) == (1, 2)


def test_who_must_know_does_not_rely_on_an_earlier_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that took long puts the next one off; shrink() asks at once, to name who has died."""
    arena = arena_for(2)
    pid = child(arena, 1)
    with peers_of(arena) as peers:
        with monkeypatch.context() as patch:
            slow = itertools.count(0, 1000)
            clocks = SimpleNamespace(monotonic=time.monotonic, thread_time=slow.__next__)
            patch.setattr(liveness, "time", clocks)
            assert peers.dead() == ()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert peers.dead() == (), "put off"
        assert peers.dead(now=True) == (1,)
        assert peers.dead() == (1,)


def test_a_process_that_has_left_lives_until_it_ends() -> None:
    """Without the arena's file it has no lock; its number tells, if no other process has taken that over."""
    before = len(os.listdir("/proc/self/fd"))
    arena = arena_for(2)
    pid = child(arena, 1, leaves=True)
    try:
        with peers_of(arena) as peers:
            assert peers.dead() == ()
        started = arena.control(1) + at.STARTED
        arena.store_word(started, arena.load_word(started) - 1)
        with peers_of(arena) as peers:
            assert peers.dead(now=True) == (1,)
        arena.store_word(started, arena.load_word(started) + 1)
        with peers_of(arena) as peers:
            assert peers.dead() == ()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert peers.dead(now=True) == (1,)
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    del arena, peers
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_has_one_pidfd_in_however_many_groups_it_is() -> None:
    arenas = [arena_for(2) for _ in range(5)]
    pids = [child(arena, 1) for arena in arenas[:1]]
    word = arenas[0].control(1)
    for arena in arenas[1:]:
        for offset in (at.PROCESS, at.STARTED, at.PID_NAMESPACE, at.STATE):
            arena.store_word(word + offset, arenas[0].load_word(word + offset))
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        for arena in arenas:
            stack.enter_context(peers_of(arena)).dead()
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len(os.listdir("/proc/self/fd")) <= before  # others may be closed meanwhile
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)


def test_several_threads_may_ask_who_lives() -> None:
    arena = arena_for(2)
    pid = child(arena, 1)
    try:
        with peers_of(arena) as peers:

            def ask(_: int) -> set[tuple[int, ...]]:
                return {peers.dead() for _ in range(20_000)}

            with ThreadPoolExecutor(3) as pool:
                assert list(pool.map(ask, range(3))) == [{()}] * 3
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_thread_that_ends_is_seen_and_one_that_lives_is_found() -> None:
    gate = threading.Event()
    ended, alive = threading.Thread(target=str), threading.Thread(target=gate.wait, args=(SOON,))
    for thread in (ended, alive):
        thread.start()
    ended.join()
    peers = PeerThreads({0: threading.current_thread(), 1: ended, 2: alive}, own=0)
    try:
        assert peers.dead() == (1,)
        assert peers.are_threads
        assert [peers.thread(rank) for rank in (1, 2, 3)] == [ended, alive, None]
        unborn = threading.Thread()
        locations = [each.location for each in describe_programs([ended, alive, unborn])]
        assert (locations[0], locations[2]) == ("has ended", "has not come")
        assert locations[1].startswith("is at ")
    finally:
        gate.set()
        alive.join()


# -- where the program is


def call_from(path: str, function: Callable[[], str]) -> str:
    """Call a function from a file with this path, line 2."""
    scope: dict[str, object] = {"function": function}
    exec(compile("def calling():\n    return function()", path, "exec"), scope)
    return scope["calling"]()


def test_the_call_site_is_the_line_of_the_program() -> None:
    line = sys._getframe().f_lineno + 1
    assert call_site() == f"{__file__}:{line} in test_the_call_site_is_the_line_of_the_program"


@pytest.mark.parametrize(
    ("path", "is_the_programs"),
    [
        ("{package}/collectives.py", False),
        ("{package}_examples/train.py", True),
        ("{stdlib}/threading.py", False),
        ("{stdlib}/concurrent/futures/thread.py", False),
        ("<frozen runpy>", False),
        ("{pytest}/python.py", False),
        ("{pytest}_examples/train.py", True),
        ("{pluggy}/_execution.py", False),
        ("/somewhere/train.py", True),
        ("<stdin>", True),
    ],
)
def test_lines_of_torchestra_and_of_libraries_are_passed_over(path: str, is_the_programs: bool) -> None:
    package, stdlib = Path(callsites.__file__).parents[2], Path(types.__file__).parent
    runners = {"pytest": Path(_pytest.__file__).parent, "pluggy": Path(pluggy.__file__).parent}
    place = path.format(package=package, stdlib=stdlib, **runners)
    found = call_from(place, call_site)
    assert found.startswith(f"{place}:2 in calling" if is_the_programs else f"{__file__}:")


def test_of_a_thread_that_torch_has_started_the_call_site_is_torchs_line() -> None:
    place = f"{Path(torch.__file__).parent}/distributed/checkpoint/saving.py"
    found: list[str] = []
    scope: dict[str, object] = {"call_site": call_site, "found": found}
    exec(compile("def saving():\n    found.append(call_site())", place, "exec"), scope)
    thread = threading.Thread(target=scope["saving"])  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert found == [f"{place}:2 in saving"]


class Held:
    pass


def test_asking_for_the_call_site_keeps_nothing_alive() -> None:
    def ask() -> weakref.ref[Held]:
        held = Held()
        call_site()
        return weakref.ref(held)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_what_a_rank_called_and_where_its_program_is_do_not_overwrite_each_other(
    contexts: tuple[RankContext, RankContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher may be asked while the ranks tell each other of a mismatch."""
    for limit in ("_ANSWER_SECONDS", "_MAX_ANSWER_SECONDS"):
        monkeypatch.setattr(collecting, limit, SOON)  # its thread may not get the processor
    zero, one = contexts
    tell_call(zero.arena, 0, "all_reduce(SUM) of 3 elements")
    watcher = StackReporter(zero.arena, 0, "pair", threading.current_thread(), lambda: zero.closed)
    watcher.start()
    zero.arena.store_word(zero.arena.control(0) + at.STATE, at.PRESENT)
    assert f"is at {__file__}" in host_report(one, [0], [0], (), "elsewhere").lines
    assert call_of(one.arena, 0) == "all_reduce(SUM) of 3 elements"
    zero.leave()
    watcher.join(SOON)
    assert not watcher.is_alive()
