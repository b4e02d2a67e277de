"""The entries of send and recv: what a call does before and after its kernel, compiled together with it.

As those of collectives (collectives.py), but that messages are no operations of the group: they have no turn,
and nothing is to be excluded. So an entry may be called while operations are queued, or another thread runs
one. A call is *plain* if

* it is by position, with the group's time-out;
* the group is open, and no profiler is on;
* its tensor is plain, of a dtype that messages can have, not complex;
* rank and tag are ints, the rank one of the group's (of recv None, too).

A message that is short, and has room or is there, is moved with the interpreter's lock held
(p2p/immediate.py). Otherwise it is released while a kernel (p2p/kernels.py) moves the message, or waits for
it. What that leaves, since something else is under way, or Python must have a look, is done by
``finish_call``, in Python, with what was read here.

Signals. A kernel that has not ended leaves BUSY to Python, which takes it over in the ``try`` that would give
it back. HANDED_OVER says that it has not got there yet: if ``finish_call`` raises and it is still set to this
thread, a handler has raised in its first line, and LEAVE gives the message up. No other thread has written it
meanwhile: for that it would have had to find BUSY free.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine.entries.plain_calls import (
    abandon_operation,
    dtype_of,
    is_profiled,
    plan_for,
    read_view,
    slow_path,
)
from torchestra.engine.entries.python_interface import (
    add_reference,
    call_object,
    drop_reference,
    int_of,
    release_interpreter,
    take_interpreter,
    word_of,
)
from torchestra.engine.layout import DONE
from torchestra.engine.native.atomics import kernel, load, store
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.immediate import receive_now, send_now
from torchestra.engine.p2p.kernels import transfer

_PEER, _TAG, _OVERFLOW = e.ARGUMENTS_AT, e.ARGUMENTS_AT + 8, e.ARGUMENTS_AT + 16
_MIN_ARGUMENTS, _MAX_ARGUMENTS = 2, 4


@kernel
def _read_address(entry, arguments, number, sending):
    """Write PEER (-1: any) and TAG of a call; return whether they are such as messages have."""
    access = load(entry + e.ACCESS)
    rank = load(arguments + 8)
    store(entry + _OVERFLOW, 0)
    store(entry + _TAG, 0)
    if sending == 0 and rank == load(access + e.NONE):
        store(entry + _PEER, -1)
    else:
        if load(rank + e.OBJECT_CLASS) != load(access + e.INTEGER):
            return False
        peer = word_of(rank, entry + _OVERFLOW)
        if peer < 0 or peer >= load(entry + e.SIZE):
            return False
        store(entry + _PEER, peer)
    if number > _MIN_ARGUMENTS:
        tag = load(arguments + 16)
        if load(tag + e.OBJECT_CLASS) != load(access + e.INTEGER):
            return False
        store(entry + _TAG, word_of(tag, entry + _OVERFLOW))
    return load(entry + _OVERFLOW) == 0


@kernel
def _is_plain(entry, arguments, number, keywords, sending):
    if keywords != 0 or number < _MIN_ARGUMENTS or number > _MAX_ARGUMENTS:
        return False
    access = load(entry + e.ACCESS)
    if load(load(entry + e.STATE) + e.OFF) != 0:
        return False
    if number == _MAX_ARGUMENTS and load(arguments + 24) != load(access + e.NONE):
        return False
    if is_profiled(access) or not _read_address(entry, arguments, number, sending):
        return False
    return read_view(access, load(arguments), entry + e.VIEWS)


@kernel
def finish_call(entry, code, address, length, kind, peer, tag):
    """Have Python do what a kernel has left; returns what ``finish_call`` does, or 0 with an exception."""
    # A thread that comes here meanwhile writes its own arguments in the same place: what is to be dropped is
    # kept here. Python has taken the arguments out before it runs anything.
    first = int_of(code)
    second = int_of(address)
    third = int_of(length)
    fourth = int_of(kind)
    fifth = int_of(peer)
    sixth = int_of(tag)
    given = entry + e.ARGUMENTS_AT
    store(given, first)
    store(given + 8, second)
    store(given + 16, third)
    store(given + 24, fourth)
    store(given + 32, fifth)
    store(given + 40, sixth)
    result = call_object(load(entry + e.FINISH_CALL), given, 6, 0)
    drop_reference(first)
    drop_reference(second)
    drop_reference(third)
    drop_reference(fourth)
    drop_reference(fifth)
    drop_reference(sixth)
    return result


@kernel
def move(entry, sending, address, length, kind, peer, tag, result):
    """Send or receive a message; returns ``result``, or what ``finish_call`` does, or 0 with an exception."""
    mailbox = load(entry + e.MAILBOX)
    if sending != 0:
        code = send_now(mailbox, address, length, kind, peer, tag)
    else:
        code = receive_now(mailbox, address, length, kind, peer, tag)
    thread = 0
    if code == w.OCCUPIED and peer >= 0:
        thread = release_interpreter()
        code = transfer(mailbox, mailbox + w.OWN_RECORD, sending, address, length, kind, peer, tag)
        take_interpreter(thread)
        if code not in (DONE, w.QUEUED_MEANWHILE, w.OCCUPIED):
            store(mailbox + w.HANDED_OVER, thread)
    if code != DONE:
        result = finish_call(entry, code, address, length, kind, peer, tag)
        if result == 0 and thread != 0 and load(mailbox + w.HANDED_OVER) == thread:
            abandon_operation(entry, 0)
        return result
    add_reference(result)
    return result


@kernel
def _move(entry, arguments, number, keywords, sending):
    """Send or receive; returns the result, or 0 with an exception."""
    if not _is_plain(entry, arguments, number, keywords, sending):
        return slow_path(entry, arguments, number, keywords)
    view = entry + e.VIEWS
    kind = plan_for(entry, dtype_of(view), 0, 0) - 1
    if kind < 0:
        return slow_path(entry, arguments, number, keywords)
    peer = load(entry + _PEER)
    tag = load(entry + _TAG)
    address = load(view + e.VIEW_DATA)
    length = load(view + e.VIEW_LENGTH)
    if sending != 0:
        result = load(load(entry + e.ACCESS) + e.NONE)
    else:
        result = load(arguments + 8)
    return move(entry, sending, address, length, kind, peer, tag, result)


@kernel
def send(own, arguments, number, keywords):
    """Run ``send(tensor, rank, tag=0, timeout_s=None)``."""
    return _move(load(own + e.HEADER), arguments, number, keywords, 1)


@kernel
def recv(own, arguments, number, keywords):
    """Run ``recv(tensor, rank, tag=0, timeout_s=None)``."""
    return _move(load(own + e.HEADER), arguments, number, keywords, 0)
