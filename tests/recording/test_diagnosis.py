"""Hangs of many kinds are injected, and the first line of the report names the kind, the rank and the line.

Rank 1 does something else than it should, in a function with a line marked ``# here``; rank 0 waits for it in
vain. They meet by opening a FIFO, which rank 1 then reads from until rank 0 has got its error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine.diagnosis.last_seen import publish_last_exception, read_last_seen
from torchestra.errors import CollectiveMismatchError, CollectiveTimeoutError, DistError, RankFailedError
from worlds import KINDS, outcomes, processes, set_timeout

SECONDS = 1.0  # in which rank 1 gets to where the report is to find it
SOON = 30.0
MANY_BYTES = 1 << 24


def here(function: Callable[..., Any]) -> str:
    """The place of the line of a function that is marked, as diagnoses name it."""
    first = function.__code__.co_firstlineno
    with open(__file__) as file:
        lines = file.readlines()
    line = next(
        number for number in range(first, len(lines)) if lines[number - 1].rstrip().endswith("# here")
    )
    return f"{__file__}:{line} in {function.__name__}"


def diagnosis(message: str) -> str:
    """The first line of the report in an error: the second of the message."""
    return message.splitlines()[1]


def check(found: str, kind: str, what: str, function: Callable[..., Any], likely: bool = False) -> None:
    head = f"diagnosis{' (likely)' if likely else ''}: {kind}: {what}"
    assert found.startswith(head), found
    assert here(function) in found


def give_up_waiting(rank_1: Callable[[str], None], fifo: str) -> str:
    """Rank 0 gives up waiting for rank 1, which does what it is told to. What the error says."""
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        rank_1(fifo)
        return ""
    return give_up_waiting_now(fifo)


def give_up_waiting_now(fifo: str) -> str:
    with open(fifo, "w"):
        set_timeout(SECONDS)
        with pytest.raises(DistError) as caught:
            dist.all_reduce(torch.ones(3))
    return str(caught.value)


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def await_state(pid: int, state: str) -> None:
    """Wait until a process is in a state, by the letter that /proc has for it."""
    while f"\nState:\t{state}" not in Path(f"/proc/{pid}/status").read_text():
        threading.Event().wait(0.01)


def told(kind: str, rank_1: Callable[[str], None], fifo: str) -> str:
    """What rank 0 finds."""
    zero, _ = outcomes(kind, 2, give_up_waiting, rank_1, fifo)
    return diagnosis(zero.result())


def is_elsewhere(fifo: str) -> None:
    with open(fifo) as file:
        file.read()  # here


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank(kind: str, fifo: str) -> None:
    found = told(kind, is_elsewhere, fifo)
    call = "operation 3, all_reduce(SUM, float32, 3 elements)"
    check(found, "missing rank", f"rank 1 has not called {call}: it is at", is_elsewhere)
    assert re.search(r", and sleeps \(\d+% of a core\)$", found)


def calls_something_else() -> str:
    try:
        if dist.get_rank() == 1:
            dist.barrier()  # here
        else:
            dist.all_reduce(torch.ones(3))
    except CollectiveMismatchError as error:
        return str(error)
    raise AssertionError("nobody noticed")


def test_a_mismatch() -> None:
    for ended in outcomes("threads", 3, calls_something_else):
        check(diagnosis(ended.result()), "mismatch", "rank 1 called barrier() at ", calls_something_else)


def broadcasts_from_a_rank_that_does_not() -> str:
    try:
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(2), 0)  # here
        else:
            dist.all_reduce(torch.ones(2))
        dist.barrier()
    except CollectiveMismatchError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatch_that_is_found_late(kind: str) -> None:
    for ended in outcomes(kind, 2, broadcasts_from_a_rank_that_does_not):
        found = diagnosis(ended.result())
        calls = "rank 1 called broadcast(float32, 2 elements, root 0), and rank 0 all_reduce(SUM, float32, 2"
        assert found.startswith(f"diagnosis: mismatch: {calls} elements); now rank 1 is at "), found
        assert here(broadcasts_from_a_rank_that_does_not) in found


def takes_two_groups_in_different_orders() -> str:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(DistError):
            dist.all_reduce(torch.ones(1), group=second)  # here
        return ""
    while (last := dist.flight_record(second).ranks[1].last_operation) is None or last.kind != "all_reduce":
        threading.Event().wait(0.01)
    first.set_timeout(SECONDS)
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.all_reduce(torch.ones(2), group=first)
    second.abort()
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_wrong_order_of_two_groups(kind: str) -> None:
    zero, one = outcomes(kind, 2, takes_two_groups_in_different_orders)
    one.result()
    found = diagnosis(zero.result())
    check(found, "wrong order of groups", "rank 0 is in ", takes_two_groups_in_different_orders)
    assert "; rank 1 is in all_reduce(SUM, float32, 1 element) of group " in found


def both_receive_first() -> str:
    tensor = torch.ones(2)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(tensor, 0, tag=5)  # here
        dist.send(tensor, 0, tag=5)
        return ""
    while not dist.flight_record().ranks[1].messages:
        threading.Event().wait(0.01)
    set_timeout(SECONDS)
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.recv(tensor, 1, tag=5)
    dist.send(tensor, 1, tag=5)
    dist.recv(tensor, 1, tag=5)
    return str(caught.value)


def test_swapped_send_and_receive() -> None:
    zero, _ = outcomes("threads", 2, both_receive_first)
    found = diagnosis(zero.result())
    check(found, "swapped send and recv", "rank 0 waits in recv(float32, from rank 1", both_receive_first)
    assert "; rank 1 waits in recv(float32, from rank 0" in found


def sends_with_another_tag() -> str:
    tensor = torch.ones(2)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(tensor, 0, tag=6)  # here
        dist.send(tensor, 0, tag=5)
        return ""
    dist.send(tensor, 1, tag=5)
    while not dist.flight_record().ranks[1].messages:
        threading.Event().wait(0.01)
    set_timeout(SECONDS)
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.recv(tensor, 1, tag=5)
    dist.send(tensor, 1, tag=6)
    dist.recv(tensor, 1, tag=5)
    return str(caught.value)


def test_messages_with_different_tags() -> None:
    zero, _ = outcomes("threads", 2, sends_with_another_tag)
    found = diagnosis(zero.result())
    what = "rank 1 waits in recv(float32, from rank 0, 8 bytes, tag 6)"
    check(found, "mismatch", what, sends_with_another_tag, likely=True)
    assert ", and has not received what rank 0 sent it with another tag, send(float32, to rank 1," in found


def does_not_come_to_the_monitored_barrier(fifo: str) -> str:
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        is_elsewhere(fifo)
        return ""
    with open(fifo, "w"), pytest.raises(DistError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=SECONDS))
    return str(caught.value)


def test_a_rank_that_is_missing_at_a_monitored_barrier(fifo: str) -> None:
    zero, _ = outcomes("threads", 2, does_not_come_to_the_monitored_barrier, fifo)
    (found,) = (line for line in zero.result().splitlines() if line.startswith("diagnosis"))
    check(found, "missing rank", "rank 1 has not called monitored_barrier(): it is at ", is_elsewhere)


def waits_for_a_lock(fifo: str) -> None:
    """Two threads take two locks in different orders; rank 0's error ends that."""
    mine, other = threading.Lock(), threading.Lock()
    both = threading.Barrier(3)

    def load() -> None:
        with other:
            both.wait()
            with mine:
                pass

    def free() -> None:
        both.wait()
        with open(fifo) as file:
            file.read()
        other.release()

    for body in (load, free):
        threading.Thread(target=body, name=body.__name__, daemon=True).start()
    with mine:
        both.wait()
        other.acquire()  # here


def test_a_deadlock_on_python_locks(fifo: str) -> None:
    found = told("threads", waits_for_a_lock, fifo)
    check(found, "deadlock on a Python lock", "rank 1 waits for lock `other` at ", waits_for_a_lock)
    assert "; thread 'load' holds it, at " in found


def waits_for_a_thread(fifo: str, executor: bool) -> None:
    """Wait for the end of a thread that waits for a lock which this one holds; rank 0's error ends that."""
    lock = threading.Lock()

    def write() -> None:
        with lock:
            pass

    def free() -> None:
        with open(fifo) as file:
            file.read()
        lock.release()

    threading.Thread(target=free, daemon=True).start()
    lock.acquire()
    if executor:
        with ThreadPoolExecutor(1, "writer") as threads:
            threads.submit(write).result()  # here
    else:
        thread = threading.Thread(target=write, name="writer_0", daemon=True)
        thread.start()
        thread.join()


@pytest.mark.parametrize("executor", [False, True])
def test_a_deadlock_on_a_lock_through_the_end_of_a_thread(executor: bool, fifo: str) -> None:
    found = told("threads", partial(waits_for_a_thread, executor=executor), fifo)
    what = "diagnosis: deadlock on a Python lock: rank 1 waits for the end of thread 'writer_0' at "
    assert found.startswith(what), found
    assert f"; that is at {__file__}:" in found
    assert found.endswith(" in write, and waits for lock `lock`, which the former holds")


def holds_the_gil(fifo: str) -> None:
    descriptor = os.open(fifo, os.O_RDONLY)
    ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)  # here
    os.close(descriptor)


def test_the_gil_is_held(fifo: str) -> None:
    found = told("processes", holds_the_gil, fifo)
    check(
        found, "GIL held", "rank 1 does not answer, as a call that does not release it holds", holds_the_gil
    )


def another_thread_holds_the_gil(fifo: str) -> None:
    thread = threading.Thread(target=holds_the_gil, args=(fifo,))
    thread.start()
    thread.join()


def test_another_thread_holds_the_gil(fifo: str) -> None:
    found = told("processes", another_thread_holds_the_gil, fifo)
    assert found.startswith("diagnosis: GIL held: rank 1 does not answer, as "), found
    assert "in another_thread_holds_the_gil; other threads are at " in found
    assert here(holds_the_gil) in found


def is_stopped(fifo: str) -> None:
    context = dist.group.WORLD.communicator.engine.context
    while "is_stopped" not in read_last_seen(context.arena, context.rank):
        threading.Event().wait(0.01)  # here
    with open(fifo):
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_rank_1_within_an_operation() -> str:
    """Rank 1 waits for rank 0 in an operation when it is stopped, and rank 0 then waits for it there."""
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1 << 18))
    while True:
        record = dist.flight_record().ranks[1]
        last = record.last_operation
        if last is not None and last.count == 1 << 18 and record.waiting_for == 0:
            break
        threading.Event().wait(0.01)
    os.kill(record.pid, signal.SIGSTOP)
    await_state(record.pid, "T")
    set_timeout(SECONDS)
    with pytest.raises(DistError) as caught:
        dist.all_reduce(torch.ones(1 << 18))
    return str(caught.value)


def test_a_process_that_is_stopped_within_an_operation() -> None:
    with processes(2, stop_rank_1_within_an_operation) as world:
        message = world.wait(0).result()
    assert "all ranks had arrived" in message.splitlines()[0]
    assert diagnosis(message).startswith("diagnosis: stopped process: rank 1 is stopped, by SIGSTOP"), message


def test_a_stopped_process(fifo: str) -> None:
    with processes(2, give_up_waiting, is_stopped, fifo) as world:
        found = diagnosis(world.wait(0).result())
    check(found, "stopped process", "rank 1 is stopped, by SIGSTOP", is_stopped)
    assert "last seen at " in found


def until_released(fifo: str) -> Callable[[], bool]:
    """Tell whether rank 0 has its error."""
    released = threading.Event()

    def wait() -> None:
        with open(fifo) as file:
            file.read()
        released.set()

    threading.Thread(target=wait, daemon=True).start()
    return released.is_set


def reads_from_disk(fifo: str) -> None:
    is_over = until_released(fifo)
    descriptor = os.open(f"{fifo}.data", os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, MANY_BYTES)
    while not is_over():
        os.preadv(descriptor, [memory], 0)  # here
    os.close(descriptor)


def waits_for_a_loader(fifo: str) -> None:
    """The loader works for longer on what it has read than it takes to read that, and rank 1 waits for it."""
    is_over = until_released(fifo)
    loader = os.fork()
    if loader == 0:
        descriptor = os.open(f"{fifo}.data", os.O_RDONLY | os.O_DIRECT)
        memory = mmap.mmap(-1, MANY_BYTES)
        while True:
            began = time.monotonic()
            os.preadv(descriptor, [memory], 0)
            ended = time.monotonic()
            while time.monotonic() - ended < 1.5 * (ended - began):
                pass
    while not is_over():
        threading.Event().wait(0.01)  # here
    os.kill(loader, signal.SIGKILL)
    os.waitpid(loader, 0)


def faults_pages_in(fifo: str) -> None:
    is_over = until_released(fifo)
    descriptor = os.open(f"{fifo}.data", os.O_RDWR)
    memory = mmap.mmap(descriptor, MANY_BYTES)
    memory.madvise(mmap.MADV_RANDOM)
    while not is_over():
        memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        sum(memory[:: 4 * mmap.PAGESIZE])
    os.close(descriptor)


@pytest.fixture
def on_disk(fifo: str) -> str:
    """A FIFO beside a file that lies on a disk, and not in memory only."""
    path = f"{fifo}.data"
    with open(path, "wb") as file:
        file.write(os.urandom(MANY_BYTES))
        os.fsync(file.fileno())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("temporary files lie in memory here")
    return fifo


def test_a_slow_disk(on_disk: str) -> None:
    found = told("processes", reads_from_disk, on_disk)
    check(found, "slow disk", "rank 1 waits for a disk, ", reads_from_disk, likely=True)


def test_the_slow_disk_of_a_loader(on_disk: str) -> None:
    found = told("processes", waits_for_a_loader, on_disk)
    what = "rank 1 has a child process that waits for a disk, "
    check(found, "slow disk", what, waits_for_a_loader, likely=True)


def test_pages_that_are_read_from_disk(on_disk: str) -> None:
    found = told("processes", faults_pages_in, on_disk)
    what = r"rank 1 waits for its memory to be read from disk, \d+ pages per second; it is at"
    assert re.match(rf"diagnosis \(likely\): swap: {what} \S+ in faults_pages_in; ", found), found


def goes_on_after_an_exception(fifo: str) -> None:
    try:
        raise ValueError("a damaged image")  # here
    except ValueError:
        is_elsewhere(fifo)


def test_an_exception_that_was_swallowed(fifo: str) -> None:
    found = told("threads", goes_on_after_an_exception, fifo)
    what = "rank 1 goes on after ValueError: a damaged image, raised at "
    check(found, "exception swallowed", what, goes_on_after_an_exception)


def goes_on_after_an_error_of_ours(fifo: str) -> None:
    try:
        dist.group.WORLD.communicator.recv(torch.ones(1), 0, tag=3, timeout_s=0.01)
    except CollectiveTimeoutError:
        pass
    with open(fifo) as file:
        file.read()  # here


def test_an_error_of_ours_that_was_swallowed(fifo: str) -> None:
    found = told("threads", goes_on_after_an_error_of_ours, fifo)
    what = "rank 1 goes on after its recv(float32, from rank 0, 4 bytes, tag 3) failed"
    check(found, "exception swallowed", what, goes_on_after_an_error_of_ours)


def has_uneven_data(fifo: str) -> str:
    rank, told = dist.get_rank(), ""
    for step in range(3 - rank):
        if step == 2:
            told = give_up_waiting_now(fifo)
        else:
            dist.all_reduce(torch.ones(3))
    if rank == 1:
        with open(fifo) as file:
            file.read()  # here
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_data(kind: str, fifo: str) -> None:
    zero, _ = outcomes(kind, 2, has_uneven_data, fifo)
    found = diagnosis(zero.result())
    check(found, "uneven data", "rank 1 has left the loop at ", has_uneven_data, likely=True)


def see_rank_1_die(rank_1: Callable[[], None]) -> str:
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        rank_1()
    with pytest.raises(RankFailedError) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value)


def ends_with_an_exception() -> None:
    """What Python does when nobody catches one; without the rest of its end."""
    try:
        raise ValueError("a damaged image")  # here
    except ValueError as error:
        sys.last_value = error
    publish_last_exception()
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_exception_that_ends_a_rank() -> None:
    zero, _ = outcomes("processes", 2, see_rank_1_die, ends_with_an_exception)
    found = diagnosis(zero.result())
    assert found.startswith("diagnosis: killed process: rank 1 has died (")
    assert f"; it was at {here(ends_with_an_exception)} with ValueError: a damaged image, " in found


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process() -> None:
    zero, _ = outcomes("processes", 2, see_rank_1_die, dies)
    found = diagnosis(zero.result())
    assert re.match(
        r"diagnosis: killed process: rank 1 has died \(.*\); it was at \S+\.py:\d+ in \w+, ", found
    )
