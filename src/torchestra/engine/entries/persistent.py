"""What a persistent operation does when it is called: machine code on words that were filled once.

An operation is a NativeCallable (native/callable_type.py) whose own word is the address of its Request
(entry_layout.py). Of the arguments nothing is checked again but that each tensor is where it was. The call is
handed to ``general`` if that is not so, if the operation is active, and where an ordinary call would not be
plain (collectives.py, messages.py). ``general`` is not a method of the operation, as the request would then
hold what holds it, but takes it as its argument.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine import layout as at
from torchestra.engine.entries.messages import move
from torchestra.engine.entries.plain_calls import is_profiled
from torchestra.engine.entries.python_interface import call_object
from torchestra.engine.entries.running import is_free, run
from torchestra.engine.native import callable_type
from torchestra.engine.native.atomics import call_function, kernel, load, memcpy, store

POINTERS, OWN_WORD = at.POINTERS, callable_type.OWN_WORD
_LOW = 0xFFFF_FFFF


@kernel
def call_in_general(own, arguments, number, keywords):
    """Run an operation by Python, with itself as the argument; with any other that raises a TypeError."""
    request = load(own + OWN_WORD)
    given = request + e.ARGUMENTS_AT
    store(given, own)
    others = number & 0xFFFF_FFFF
    if others != 0 or keywords != 0:
        store(given + 8, load(arguments))
        return call_object(load(request + e.GENERAL_WAY), given, 2, 0)
    return call_object(load(request + e.GENERAL_WAY), given, 1, 0)


@kernel
def _is_as_it_was(request, number, keywords):
    """Return whether there is no argument, the operation is inactive, and its tensors are where they were."""
    if number & 0xFFFF_FFFF != 0 or keywords != 0 or load(request + e.ACTIVE) != 0:
        return False
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
            return False
        if load(view + e.VIEW_DATA) != load(record + e.MEMORY_ADDRESS):
            return False
        record += e.MEMORY_RECORD_BYTES
    return True


@kernel
def collective(own, arguments, number, keywords):
    """Run a collective whose kernel and arguments are in its request."""
    request = load(own + OWN_WORD)
    if not is_free(request, 0, 0, 0, 0) or not _is_as_it_was(request, number, keywords):
        return call_in_general(own, arguments, number, keywords)
    tables = load(request + e.TABLES)
    if tables != 0:
        context = load(load(request + e.STATE) + e.CONTEXT)
        memcpy(load(context + POINTERS), tables, load(request + e.TABLES_BYTES))
    return run(
        request,
        load(request + e.WHICH),
        load(request + e.WORDS_AT),
        load(request + e.WORDS_AT + 8),
        load(request + e.WORDS_AT + 16),
        load(request + e.WORDS_AT + 24),
        load(request + e.NBYTES_MOVED),
        load(load(request + e.ACCESS) + e.NONE),
    )


@kernel
def _message(own, arguments, number, keywords, sending):
    """Send or receive what the words of the request say: address, length, kind, peer and tag."""
    request = load(own + OWN_WORD)
    access = load(request + e.ACCESS)
    if (
        load(load(request + e.STATE) + e.OFF) != 0
        or is_profiled(access)
        or not _is_as_it_was(request, number, keywords)
    ):
        return call_in_general(own, arguments, number, keywords)
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
