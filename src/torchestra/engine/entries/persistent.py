"""What a persistent operation does when it is called: machine code on words that were filled once.

An operation is a NativeCallable (native/callable_type.py) whose own word is the address of its Request
(entry_layout.py). Of the arguments nothing is checked again but that each tensor is where it was. The call is
handed to ``general`` if that is not so, if the operation is active, and where an ordinary call would not be
plain (collectives.py, messages.py). ``general`` is not a method of the operation, as the request would then
hold what holds it, but takes it as its argument.

:func:`start` and :func:`wait` are methods of the operation's class. A collective that has one meeting is
begun by ``start()``, which publishes this rank's piece and waits for nobody (kernels/waiting.py, "Starting"),
and ended by ``wait()``, or by whoever begins the group's next operation. Until then the group's STARTED
refers to it. If it cannot be published yet, as peers are too far behind, ``hand_over`` has the group's
progress thread see to it; so does, in Python, the start of an operation that is not such.

The ``start()`` of a message (:func:`start_message`) moves it if that needs no waiting, and then it has ended;
else it is a transfer like that of an isend or irecv, begun in Python.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine import layout as at
from torchestra.engine.entries import running
from torchestra.engine.entries.messages import finish_call, move
from torchestra.engine.entries.plain_calls import is_profiled
from torchestra.engine.entries.python_interface import (
    add_reference,
    call_object,
    clear_error,
    drop_reference,
    tuple_length,
)
from torchestra.engine.entries.running import is_free, run
from torchestra.engine.native import callable_type
from torchestra.engine.native.atomics import call_function, kernel, load, memcpy, store
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.immediate import receive_now, send_now

POINTERS, OWN_WORD = at.POINTERS, callable_type.OWN_WORD
RESUME, ENTERING, DONE, SINGLE_COPY = at.RESUME, at.ENTERING, at.DONE, at.SINGLE_COPY
_LOW = 0xFFFF_FFFF


@kernel
def call_slow_path(own, arguments, number, keywords):
    """Run an operation by Python, with itself as the argument; with any other that raises a TypeError."""
    request = load(own + OWN_WORD)
    given = request + e.ARGUMENTS_AT
    store(given, own)
    others = number & 0xFFFF_FFFF
    if others != 0 or keywords != 0:
        store(given + 8, load(arguments))
        return call_object(load(request + e.SLOW_PATH), given, 2, 0)
    return call_object(load(request + e.SLOW_PATH), given, 1, 0)


@kernel
def _may_begin(request, number, keywords):
    """Return whether there is no argument, the operation is inactive, and its tensors are where they were."""
    if number & 0xFFFF_FFFF != 0 or keywords != 0 or load(request + e.ACTIVE) != e.INACTIVE:
        return False
    return _is_as_it_was(request)


@kernel
def _is_as_it_was(request):
    """Return whether the tensors are where they were."""
    access = load(request + e.ACCESS)
    view = request + e.VIEWS
    record = load(request + e.MEMORY)
    for _ in range(load(request + e.TENSORS)):
        tensor = load(record + e.MEMORY_TENSOR)
        implementation = load(tensor + load(access + e.IMPLEMENTATION))
        storage = load(implementation + load(access + e.STORAGE))
        if storage == 0 or load(storage + load(access + e.NBYTES)) != load(record + e.MEMORY_NBYTES):
            return False
        if call_function(load(access + e.DESCRIBE), tensor, view) & _LOW != 0:
            clear_error()
            return False
        if load(view + e.VIEW_DATA) != load(record + e.MEMORY_ADDRESS):
            return False
        record += e.MEMORY_RECORD_BYTES
    return True


@kernel
def _fill_tables(request, context):
    """Fill the tables by peer, if the kernel uses them."""
    tables = load(request + e.TABLES)
    if tables != 0:
        memcpy(load(context + POINTERS), tables, load(request + e.TABLES_BYTES))


@kernel
def collective(own, arguments, number, keywords):
    """Run a collective whose kernel and arguments are in its request."""
    request = load(own + OWN_WORD)
    if not is_free(request, 0, 0, 0, 0) or not _may_begin(request, number, keywords):
        return call_slow_path(own, arguments, number, keywords)
    _fill_tables(request, load(load(request + e.STATE) + e.CONTEXT))
    return _run(own, request)


@kernel
def _run(own, request):
    """Run, or end, the operation; returns None, or 0 with an exception."""
    store(request + e.VIEWS, own)
    return run(
        request,
        load(request + e.WHICH),
        load(request + e.WORDS_AT),
        load(request + e.WORDS_AT + 8),
        load(request + e.WORDS_AT + 16),
        load(request + e.WORDS_AT + 24),
        load(request + e.NBYTES_MOVED),
        load(load(request + e.ACCESS) + e.NONE),
        request + e.VIEWS,
        1,
    )


@kernel
def _slow_path_method(method, own, arguments, number, keywords):
    """Call a method in Python: ``start`` takes no argument, ``wait`` one, and of more it is told two."""
    given = load(own + OWN_WORD) + e.ARGUMENTS_AT
    store(given, own)
    total = number
    if keywords != 0:
        total += tuple_length(keywords)
    if total == 0:
        return call_object(method, given, 1, 0)
    store(given + 8, load(arguments))
    if total == 1:
        return call_object(method, given, 1 + number, keywords)
    store(given + 16, load(arguments + 8))
    return call_object(method, given, 3, 0)


@kernel
def _has_one_meeting(request, context):
    """Return whether the operation is one part, by the thresholds of its kernel (kernels/selection.py)."""
    longest = load(request + e.LONGEST_PIECE)
    return longest <= load(context + load(request + e.THRESHOLD)) and longest <= load(context + SINGLE_COPY)


@kernel
def start(own, arguments, number, keywords):
    """Run ``start()`` of a collective: publish this rank's piece, and wait for nobody."""
    request = load(own + OWN_WORD)
    state = load(request + e.STATE)
    if (
        state == 0
        or not is_free(request, 0, 0, 0, 0)
        or not _may_begin(request, number, keywords)
        or not _has_one_meeting(request, load(state + e.CONTEXT))
    ):
        return _slow_path_method(load(request + e.START_WAY), own, arguments, number, keywords)
    context = load(state + e.CONTEXT)
    _fill_tables(request, context)
    code = running.start(
        request,
        load(request + e.WHICH),
        load(request + e.WORDS_AT),
        load(request + e.WORDS_AT + 8),
        load(request + e.WORDS_AT + 16),
        load(request + e.WORDS_AT + 24),
        load(request + e.NBYTES_MOVED),
    )
    if code == DONE:
        store(request + e.ACTIVE, e.ENDED)
    else:
        store(request + e.ACTIVE, e.STARTED)
        store(state + e.STARTED_OPERATION, own)
        add_reference(own)
        if load(context + RESUME) == ENTERING:
            return _slow_path_method(load(request + e.HAND_OVER), own, arguments, 0, 0)
    none = load(load(request + e.ACCESS) + e.NONE)
    add_reference(none)
    return none


@kernel
def wait(own, arguments, number, keywords):
    """Run ``wait()``: end the operation, if it was started here and has not ended since."""
    request = load(own + OWN_WORD)
    state = load(request + e.STATE)
    active = load(request + e.ACTIVE)
    if state == 0 or number != 0 or keywords != 0 or active == e.QUEUED or active == e.FAILED:
        return _slow_path_method(load(request + e.WAIT_WAY), own, arguments, number, keywords)
    if active == e.STARTED:
        taken = load(state + e.OFF) | load(state + e.GENERAL) | load(state + e.INSIDE)
        if taken != 0 or not _is_as_it_was(request):
            return _slow_path_method(load(request + e.WAIT_WAY), own, arguments, number, keywords)
        store(state + e.STARTED_OPERATION, 0)
        store(request + e.ACTIVE, e.INACTIVE)
        result = _run(own, request)
        drop_reference(own)
        if result == 0:
            return 0
        drop_reference(result)
    store(request + e.ACTIVE, e.INACTIVE)
    true = load(load(request + e.ACCESS) + e.TRUE)
    add_reference(true)
    return true


@kernel
def _may_move(request, number, keywords):
    """Return whether a call is plain: as :func:`_may_begin` says, and the group open, and no profiler on."""
    if load(load(request + e.STATE) + e.OFF) != 0 or is_profiled(load(request + e.ACCESS)):
        return False
    return _may_begin(request, number, keywords)


@kernel
def start_message(own, arguments, number, keywords):
    """Run ``start()`` of a message: move it, if that needs no waiting."""
    request = load(own + OWN_WORD)
    if load(request + e.STATE) == 0 or not _may_move(request, number, keywords):
        return _slow_path_method(load(request + e.START_WAY), own, arguments, number, keywords)
    mailbox = load(request + e.MAILBOX)
    address = load(request + e.WORDS_AT)
    length = load(request + e.WORDS_AT + 8)
    kind = load(request + e.WORDS_AT + 16)
    peer = load(request + e.WORDS_AT + 24)
    tag = load(request + e.WORDS_AT + 32)
    if load(request + e.SENDS) != 0:
        code = send_now(mailbox, address, length, kind, peer, tag)
    else:
        code = receive_now(mailbox, address, length, kind, peer, tag)
    if code == w.OCCUPIED:
        return _slow_path_method(load(request + e.START_WAY), own, arguments, number, keywords)
    store(request + e.SOURCE, peer)
    store(request + e.ACTIVE, e.ENDED)
    if code != DONE:
        return finish_call(request, code, address, length, kind, peer, tag)
    none = load(load(request + e.ACCESS) + e.NONE)
    add_reference(none)
    return none


@kernel
def _message(own, arguments, number, keywords, sending):
    """Send or receive what the words of the request say: address, length, kind, peer and tag."""
    request = load(own + OWN_WORD)
    access = load(request + e.ACCESS)
    if not _may_move(request, number, keywords):
        return call_slow_path(own, arguments, number, keywords)
    address = load(request + e.WORDS_AT)
    length = load(request + e.WORDS_AT + 8)
    kind = load(request + e.WORDS_AT + 16)
    peer = load(request + e.WORDS_AT + 24)
    tag = load(request + e.WORDS_AT + 32)
    result = move(request, sending, address, length, kind, peer, tag, load(access + e.NONE))
    if result != 0 and peer >= 0:
        store(request + e.SOURCE, peer)
    return result


@kernel
def send(own, arguments, number, keywords):
    """Send a message."""
    return _message(own, arguments, number, keywords, 1)


@kernel
def recv(own, arguments, number, keywords):
    """Receive a message; who has sent it is then in the request."""
    return _message(own, arguments, number, keywords, 0)
