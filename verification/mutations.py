"""Ways to break the kernels, each of which a case must find: this is how the checker itself is checked.

A mutation weakens an ordering by one degree, drops a fence, a check or a wait, swaps two steps, or uses one
buffer where there are several.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from verification.program import Edit


@dataclass(frozen=True)
class Mutation:
    """A change of one kernel.

    Attributes:
        kernel: its name.
        old: a text that its source has exactly once, as :func:`ast.unparse` writes it.
        new: the text in its place.
        case: the case that finds it.
    """

    kernel: str
    old: str
    new: str
    case: str

    @property
    def subject(self) -> str:
        """What is changed, for reports."""
        return self.kernel

    def edit(self) -> Edit:
        """Return the function that changes the kernel's tree."""

        def change(name: str, tree: ast.FunctionDef) -> ast.FunctionDef:
            if name != self.kernel:
                return tree
            text = ast.unparse(tree)
            if text.count(self.old) != 1:
                raise ValueError(f"{self.kernel} has {text.count(self.old)} times {self.old!r}:\n{text}")
            changed = ast.parse(text.replace(self.old, self.new)).body[0]
            assert isinstance(changed, ast.FunctionDef)
            return changed

        return change


_WAITING, _BUFFERS, _EARLY, _MOVE, _REDUCE, _EXCHANGE, _LENDING = (
    f"kernels.{name}."
    for name in ("waiting", "buffers", "eager", "move", "reduce", "exchange", "single_copy")
)
_IN_PLACE, _EXCLUSION = "kernels.in_place.", "p2p.exclusion."
_ENDPOINT, _BLOCKS = "p2p.endpoint_kernels.", "kernels.blocks."
_RING, _DOORBELL, _RECORD = "p2p.ring.", "kernels.doorbell.", "recorder.recorder."
_FLAG = "(load(context + SEQUENCE) << STEP_BITS) + step"

MUTATIONS = [
    # Publishing a step, and waking those who sleep.
    Mutation(_WAITING + "publish", "store_ordered(line", "store_relaxed(line", "all_reduce in chunks"),
    Mutation(_WAITING + "publish", "store_ordered(line", "store_release(line", "all_reduce in chunks"),
    Mutation(
        _WAITING + "publish",
        f"store_ordered(line, {_FLAG})\n    _wake_if_any(context, line)",
        f"_wake_if_any(context, line)\n    store_ordered(line, {_FLAG})",
        "all_reduce in chunks",
    ),
    Mutation(_WAITING + "publish", "\n    _wake_if_any(context, line)", "", "all_reduce in chunks"),
    Mutation(_WAITING + "_wake_if_any", "load_ordered(", "load_acquire(", "all_reduce in chunks"),
    Mutation(
        _WAITING + "_wake_if_any",
        "syscall(FUTEX, line, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)",
        "pass",
        "barrier",
    ),
    Mutation(_WAITING + "wake_sleepers", "    full_fence()\n", "", "barrier"),
    Mutation(_WAITING + "post", "store_release(line", "store_relaxed(line", "all_reduce beside the flag"),
    Mutation(_WAITING + "end_posted", "    wake_sleepers(context)\n", "", "barrier"),
    # Waiting for a step.
    Mutation(
        _WAITING + "wait_until",
        "if load_acquire(word) >= target:\n        return DONE\n    for",
        "if load_relaxed(word) >= target:\n        return DONE\n    for",
        "all_reduce beside the flag",
    ),
    Mutation(
        _WAITING + "_yield_then_sleep",
        "now = load_acquire(word)",
        "now = load_relaxed(word)",
        "all_reduce in slots",
    ),
    Mutation(
        _WAITING + "_yield_then_sleep",
        "fetch_add(waiters, 1)\n",
        "pass\n",
        "barrier",
    ),
    Mutation(
        _WAITING + "_yield_then_sleep",
        "fetch_add(waiters, 1)",
        "store_ordered(waiters, load_ordered(waiters) + 1)",
        "barrier of three",
    ),
    Mutation(_WAITING + "_yield_then_sleep", "if seen < target:", "if True:", "barrier"),
    Mutation(
        _WAITING + "_yield_then_sleep",
        "if load_acquire(load(context + ABORT)) != 0:",
        "if False:",
        "barrier, a rank crashes",
    ),
    # Starting an operation, and waiting for nobody.
    Mutation(
        _WAITING + "wait_until",
        "wake_sleepers(context)\n        store(",
        "store(",
        "all_reduce, started",
    ),
    Mutation(
        _WAITING + "stop_waiting", "store(context + HOLDS_INTERPRETER, 1)", "pass", "all_reduce, started"
    ),
    # Beginning an operation, and meeting.
    Mutation(_WAITING + "enter", "load(context + SEEN) < begun", "False", "broadcast, far ahead"),
    Mutation(_WAITING + "enter", "- apart", "- apart - 1", "broadcast, far ahead"),
    Mutation(
        _WAITING + "meet",
        "if code != DONE:\n                return code\n            line",
        "line",
        "all_reduce in slots, a rank crashes",
    ),
    Mutation(_WAITING + "meet", "verdict = MISMATCH", "verdict = DONE", "barrier, counts differ"),
    Mutation(
        _WAITING + "meet",
        "if verdict != DONE:\n        wake_sleepers(context)\n    ",
        "",
        "barrier, counts differ",
    ),
    Mutation(
        _WAITING + "arrive",
        "    store(line + SHARED, shared)\n    store(line + LENDS, 0)\n    publish(context, 1)",
        "    store(line + LENDS, 0)\n    publish(context, 1)\n    store(line + SHARED, shared)",
        "all_reduce in heaps",
    ),
    Mutation(_WAITING + "await_piece", "code == DONE", "code == PENDING", "broadcast, counts differ"),
    Mutation(
        _WAITING + "await_piece",
        "wait_until(context, peer, (sequence << STEP_BITS) + 1)",
        "DONE",
        "broadcast",
    ),
    Mutation(_WAITING + "final_barrier", "wait_for_step(context, 2)", "DONE", "all_reduce in heaps"),
    Mutation(_WAITING + "flag_line", "sequence & FLAGS - 1", "0", "all_reduce beside the flag"),
    # Buffers.
    Mutation(_BUFFERS + "buffer_of", "load(context + SEQUENCE) & 1", "0", "all_reduce in slots"),
    Mutation(_BUFFERS + "buffer_of", "chunk % 3", "chunk % 1", "all_gather in parts"),
    Mutation(_BUFFERS + "eager_slot", "load(context + SEQUENCE) & WINDOW - 1", "0", "broadcast"),
    Mutation(_BUFFERS + "apart", "else 1", "else 2", "all_reduces and broadcasts in turn"),
    Mutation(
        _EARLY + "eager_broadcast",
        "if rank == root:\n            memcpy(",
        "post(context, meta, count)\n        if rank == root:\n            memcpy(",
        "broadcast",
    ),
    Mutation(
        _REDUCE + "_all_reduce_direct",
        "fill(context, first_piece(context, rank, length), address, length)\n"
        "        post(context, meta, count)",
        "post(context, meta, count)\n"
        "        fill(context, first_piece(context, rank, length), address, length)",
        "all_reduce beside the flag",
    ),
    Mutation(
        _IN_PLACE + "end_in_place", "code = final_barrier(context)", "code = DONE", "all_reduce in heaps"
    ),
    Mutation(
        _IN_PLACE + "end_in_place",
        "code = final_barrier(context)",
        "code = DONE",
        "all_reduce of a list in heaps",
    ),
    Mutation(
        _IN_PLACE + "tell",
        "copy_in(context, parts, number, start, length, unit, target)",
        "pass",
        "all_reduce of a list in heaps",
    ),
    Mutation(
        _IN_PLACE + "is_late", "return True", "return False", "all_reduce of a list, in the heap of one"
    ),
    Mutation(
        _REDUCE + "_all_reduce_chunked",
        "_leave_pieces(context, parts, number, 0, count, unit)\n        publish(context, 2)",
        "publish(context, 2)\n            _leave_pieces(context, parts, number, 0, count, unit)",
        "all_reduce of a list, in the heap of one",
    ),
    Mutation(
        _MOVE + "_share_in_place", "code = final_barrier(context)", "code = DONE", "all_gather from heaps"
    ),
    # Tensors that are lent.
    Mutation(_MOVE + "_share_in_place", "code = final_barrier(context)", "code = DONE", "all_gather, lent"),
    Mutation(
        _EXCHANGE + "_exchange_in_place", "code = final_barrier(context)", "code = DONE", "all_to_all, lent"
    ),
    Mutation(_EXCHANGE + "exchange", "extra = 1\n", "extra = 0\n", "all_to_all, lent in vain"),
    Mutation(
        _LENDING + "lend",
        "    store(line + ADDRESS, address)\n",
        "    publish(context, 1)\n    store(line + ADDRESS, address)\n",
        "all_gather, lent",
    ),
    # Messages.
    Mutation(_RING + "put", "    full_fence()\n", "    pass\n", "a message longer than the ring"),
    Mutation(_RING + "prepare_sleep", "    full_fence()\n", "", "a message longer than the ring"),
    Mutation(
        _RING + "prepare_sleep",
        "rung = load_ordered(doorbell + w.RUNG)\n    store_ordered(doorbell + w.SLEEPING, 1)",
        "store_ordered(doorbell + w.SLEEPING, 1)\n    rung = load_ordered(doorbell + w.RUNG)",
        "messages",
    ),
    Mutation(
        _RING + "put", "store_release(channel", "store_relaxed(channel", "a message longer than the ring"
    ),
    Mutation(_RING + "put_header", "store_ordered(slot", "store_release(slot", "messages"),
    Mutation(_RING + "put_header", "store_release(slot", "store_relaxed(slot", "messages through the ring"),
    Mutation(_RING + "next_header", "load_acquire(", "load_relaxed(", "messages"),
    Mutation(_RING + "next_header", "== got + 1", "!= 0", "messages, numbers wrap"),
    Mutation(_RING + "take", "    full_fence()\n", "    pass\n", "a message as long as two rings"),
    Mutation(
        _RING + "take", "load_acquire(channel", "load_relaxed(channel", "a message longer than the ring"
    ),
    Mutation(_RING + "ring_doorbell", "fetch_add(doorbell + w.RUNG, 1)\n", "pass\n", "messages"),
    # A blocking call, and what another thread leaves.
    Mutation(_EXCLUSION + "leave", "load_ordered(", "load_acquire(",
             "a message, and what another thread leaves"),
    Mutation(_EXCLUSION + "leave", "store_ordered(", "store_release(",
             "a message, and what another thread leaves"),
    Mutation(_EXCLUSION + "leave", "w.QUEUED_MEANWHILE", "DONE", "a message, and what another thread leaves"),
    Mutation("p2p.kernels._sleep_until_moved", "if moved == 0 and load_ordered(state + w.ATTENTION) == 0:",
             "if moved == 0:", "a message for what another thread leaves"),
    Mutation("p2p.kernels.run", "if load_acquire(state + w.ATTENTION) != 0:", "if False:",
             "a message for what another thread leaves"),
    # Calls.
    Mutation(_ENDPOINT + "_put", "_ring_for_message(state, peer)", "pass", "calls"),
    Mutation(_ENDPOINT + "_ring_for_message", "who == NOBODY", "False", "calls of two threads"),
    Mutation(_ENDPOINT + "_wake", "fetch_add(pair, 1)\n", "pass\n", "calls"),
    Mutation(_ENDPOINT + "await_message", "if _find(state, only) == 0 and", "if", "calls"),
    Mutation(
        _ENDPOINT + "await_message",
        "rung = load_ordered(lead)\n        store_ordered(lead + STATUS, ASLEEP)",
        "store_ordered(lead + STATUS, ASLEEP)\n        rung = load_ordered(lead)",
        "calls",
    ),
    Mutation(
        _ENDPOINT + "await_message",
        "store_ordered(lead + STATUS, ASLEEP)\n        full_fence()",
        "store_release(lead + STATUS, ASLEEP)",
        "calls through the ring",
    ),
    Mutation(_ENDPOINT + "begin_receive", "_wake_follower(state)", "pass", "calls of two threads"),
    Mutation(_ENDPOINT + "watch", "_any_message(state) == 0 and ", "", "calls of two threads"),
    Mutation(
        _ENDPOINT + "watch",
        "fetch_add(pair + STATUS, 1)\n        full_fence()",
        "store_release(pair + STATUS, 1)",
        "calls of two threads",
    ),
    Mutation(
        _ENDPOINT + "await_message",
        "store_ordered(lead + STATUS, NOBODY)\n        full_fence()",
        "store_release(lead + STATUS, NOBODY)",
        "calls of two threads",
    ),
    Mutation(_ENDPOINT + "_any_message", "taken + 1", "1", "calls of two threads, few slots"),
    Mutation(_ENDPOINT + "_ring_room", "_wake(room)", "pass", "calls, few slots"),
    Mutation(_ENDPOINT + "_is_half_full", "w.SLOTS >> 1", "-1", "calls, few slots"),
    Mutation(_ENDPOINT + "begin_receive", "_ring_room(state, peer)", "pass", "calls, few slots"),
    Mutation(
        _ENDPOINT + "continue_send", "done = _push(state, record, peer)", "done = False", "calls, few slots"
    ),
    Mutation(
        _ENDPOINT + "continue_send",
        "store_ordered(room + STATUS, 1)\n        full_fence()",
        "store_release(room + STATUS, 1)",
        "calls through the ring",
    ),
    Mutation(
        _ENDPOINT + "continue_send",
        "rung = load_ordered(room)\n        moved = load(record + w.MOVED)\n"
        "        store_ordered(room + STATUS, 1)",
        "moved = load(record + w.MOVED)\n        store_ordered(room + STATUS, 1)\n"
        "        rung = load_ordered(room)",
        "calls, few slots",
    ),
    # Blocks of memory.
    Mutation(_BLOCKS + "take_block", "compare_exchange(entry + STATE, FREE, TAKEN) == FREE", "True",
             "blocks, of two threads"),
    Mutation(_BLOCKS + "take_block", "if _is_of(entry, length, pool):\n                    return",
             "if True:\n                    return", "blocks, another in the place of one"),
    Mutation(_BLOCKS + "give_block", "store_release(", "store_relaxed(", "blocks, of two threads"),
    Mutation(_BLOCKS + "retire_block", "compare_exchange(entry + STATE, FREE, RETIRED) == FREE", "True",
             "blocks, of two threads"),
    # The doorbell of a queue.
    Mutation(_DOORBELL + "ring", "load_ordered(", "load_acquire(", "doorbell"),
    Mutation(
        _DOORBELL + "await_task",
        "closed = load_ordered(words + CLOSED)\n        submitted = load_ordered(words + SUBMITTED)",
        "submitted = load_ordered(words + SUBMITTED)\n        closed = load_ordered(words + CLOSED)",
        "doorbell",
    ),
    Mutation(
        _DOORBELL + "close",
        "store_ordered(words + CLOSED, 1)\n    ring(words)",
        "ring(words)\n    store_ordered(words + CLOSED, 1)",
        "doorbell",
    ),
    # The flight recorder.
    Mutation(_RECORD + "write_entry", "    release_fence()\n", "", "record of collectives"),
    Mutation(_RECORD + "write_entry", "store_release(entry + STAMP, 0)", "pass", "record of collectives"),
    Mutation(_RECORD + "write_entry", "store_release(entry + STAMP, stamp)",
             "store_relaxed(entry + STAMP, stamp)", "record of collectives"),
    Mutation(_RECORD + "close_entry", "store_release(entry + ENDED", "store(entry + ENDED",
             "record of collectives"),
    Mutation(_RECORD + "read_entry", "stamp = load_acquire(", "stamp = load_relaxed(",
             "record of collectives"),
    Mutation(_RECORD + "read_entry", "load_acquire(entry + offset)", "load_relaxed(entry + offset)",
             "record of collectives"),
    Mutation(_RECORD + "read_entry", "load_acquire(entry + STAMP) == stamp", "True",
             "record of collectives"),
    Mutation(_RECORD + "begin_wait", "    release_fence()\n", "", "record of a wait"),
    Mutation(_RECORD + "begin_wait", "store_release(", "store(", "record of a wait"),
    Mutation(_RECORD + "read_wait", "load_acquire(record + WAITING_SINCE) == since", "True",
             "record of a wait"),
    Mutation(_RECORD + "read_wait", "load_acquire(record + WAITING_FOR)",
             "load_relaxed(record + WAITING_FOR)", "record of a wait"),
    Mutation(_RECORD + "message_came", "load(entry + STAMP) == number", "True", "record of messages"),
    Mutation(_RECORD + "close_message", "load(entry + STAMP) == number", "True", "record of messages"),
]  # fmt: skip

REDUNDANT = [
    # The system's part of falling asleep begins with a full fence, and compares the word again. The kernels
    # keep these orderings all the same, so that the proofs in waiting.py and doorbell.py
    # need only the comparison.
    Mutation(_WAITING + "_yield_then_sleep", "seen = load_ordered(", "seen = load_acquire(", "barrier"),
    Mutation(
        _DOORBELL + "await_task",
        "store_ordered(words + ASLEEP, 1)",
        "store_release(words + ASLEEP, 1)",
        "doorbell",
    ),
    # Every operation that posts wakes sleepers at its end. This call is for promptness: they need not sleep
    # as long as this rank does.
    Mutation(_WAITING + "_yield_then_sleep", "    wake_sleepers(context)\n", "", "all_reduce in slots"),
]
"""Changes that break nothing, and why the kernels do not have them. They must pass."""
