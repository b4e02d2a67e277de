"""The doorbell of a queue: its thread sleeps, without the interpreter's lock, until it has a task to run.

A program that waits for an operation soon after calling it runs it itself (progress.py). A thread that woke
up for every task would fight it for the interpreter's lock, and for its core, to find the task begun. So the
thread sleeps here, and lets a task stand for a while before it goes back to Python to run it. Waking a thread
costs the waker more than a small operation takes, so while there is much to do nobody is woken: the thread
sleeps shortly, and looks after each sleep. Only when nothing has come in some of them does it sleep until it
is rung.

The words, of one queue: SUBMITTED and URGENT are counted up by whoever submits or hurries, BEGUN is
written by whoever has the turn.

Invariant: **whatever the thread is to see when it sleeps is written before SUBMITTED is counted up**, the
word that it sleeps on; so both a task and the end are told by :func:`ring`. Then no wake-up is lost. The
thread reads SUBMITTED, then what there is to do, then does ``ASLEEP = 1; read SUBMITTED``, and sleeps while
that is what it was at first. Whoever rings does ``SUBMITTED += 1; read ASLEEP``. All of these are
sequentially consistent, so one of the two sees the other's write: the thread that SUBMITTED has changed (the
futex compares it once more, as one step with falling asleep), or who rings that it is to wake the thread. A
wake-up without a change of the word would be lost if it came between the thread's last look and its sleep.

CLOSED is read before SUBMITTED, and written after the last task has been counted there: so whoever finds it
set, and nothing submitted that is not begun, has seen all tasks.

A short sleep begins with a look at URGENT, before the others, and is a wait for that word to change, or for
GRACE to pass: the end of an early sleep that is missed costs no more than that.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.waiting import ALL_WAITERS, FUTEX, FUTEX_WAIT, FUTEX_WAKE
from torchestra.engine.native.atomics import (
    fetch_add,
    kernel,
    load_acquire,
    load_ordered,
    store_ordered,
    syscall,
)

SUBMITTED = 0  # how often it was rung: once for each task submitted, and by whoever interrupts or closes
BEGUN = 8  # how many of them have been begun
URGENT = 16  # the first so many are to be begun without delay
ASLEEP = 24  # whether the thread sleeps until something is submitted
CLOSED = 32
GRACE = 40  # a timespec: how long a task may stand
DOORBELL_WORDS = 7
SHORT_SLEEPS = 20


@kernel
def ring(words):
    """Have the thread look again, because a task was submitted, or the end is told; how often it was rung."""
    number = fetch_add(words + SUBMITTED, 1) + 1
    if load_ordered(words + ASLEEP) != 0:
        syscall(FUTEX, words + SUBMITTED, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)
    return number


@kernel
def start_now(words):
    """Have what has been submitted begin without delay."""
    store_ordered(words + URGENT, load_ordered(words + SUBMITTED))
    syscall(FUTEX, words + URGENT, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)
    return 0


@kernel
def close(words):
    """Have the thread end when nothing is left to be begun."""
    store_ordered(words + CLOSED, 1)
    ring(words)
    return start_now(words)


@kernel
def await_task(words):
    """Sleep until a task is urgent, or none has been begun for as long as one may stand: 1; 0 at the end."""
    short_sleeps = 0
    while True:
        urgent = load_ordered(words + URGENT)
        begun = load_acquire(words + BEGUN)
        closed = load_ordered(words + CLOSED)
        submitted = load_ordered(words + SUBMITTED)
        if submitted > begun:
            short_sleeps = 0
            if urgent > begun:
                return 1
        elif closed != 0:
            return 0
        elif short_sleeps == SHORT_SLEEPS:
            short_sleeps = 0
            store_ordered(words + ASLEEP, 1)
            if load_ordered(words + SUBMITTED) == submitted and load_ordered(words + CLOSED) == 0:
                syscall(FUTEX, words + SUBMITTED, FUTEX_WAIT, submitted & 0xFFFF_FFFF, 0, 0, 0)
            store_ordered(words + ASLEEP, 0)
            continue
        short_sleeps += 1
        syscall(FUTEX, words + URGENT, FUTEX_WAIT, urgent & 0xFFFF_FFFF, words + GRACE, 0, 0)
        if submitted > begun and load_acquire(words + BEGUN) == begun:
            return 1
