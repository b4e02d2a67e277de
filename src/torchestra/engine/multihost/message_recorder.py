"""A rank's messages to and from other hosts in its flight record (message_records.py).

They begin on any thread of the program, and end on those and on the threads that receive packets. The thread
that holds the recorder's lock writes; it holds it for one kernel only, and waits for nothing meanwhile. A
thread may take it twice, since a signal's handler may send a message too.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from torchestra.engine import layout as at
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.native.kernel import entry_point
from torchestra.engine.recorder import message_records


class RecordedMessage:
    """The record of one message. A context manager: an error that leaves it marks the message as failed.

    Args:
        recorder: the recorder that it belongs to.
    """

    __slots__ = ("_message_id", "_nbytes", "_recorder")

    def __init__(self, recorder: MessageRecorder, message_id: int, nbytes: int) -> None:
        self._recorder, self._message_id, self._nbytes = recorder, message_id, nbytes

    def __enter__(self) -> RecordedMessage:
        return self

    def __exit__(self, error_class: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.end(well=False)

    def came(self, source: int) -> None:
        """Note that the message of a receive has begun to arrive."""
        recorder = self._recorder
        with recorder.lock:
            if self._message_id:
                recorder.come(recorder.context, self._message_id, source)

    def end(self, *, well: bool, source: int = -1) -> None:
        """Note that the message has ended, and a receive's ``source``. Later calls have no effect."""
        recorder = self._recorder
        with recorder.lock:
            message_id, self._message_id = self._message_id, 0
            if message_id:
                recorder.close(recorder.context, message_id, source, self._nbytes, int(well))


class MessageRecorder:
    """Write one rank's records of messages to and from other hosts.

    Attributes:
        lock, context, open, come, close: for entries: held while a kernel runs, its first argument, and the
            kernels.
    """

    def __init__(self, context: RankContext) -> None:
        self._arena = context.arena  # which stays mapped as long as this object lives
        # A context of its own, for the clock's scratch in it.
        self._words: npt.NDArray[np.int64] = np.zeros(at.CONTEXT_BYTES // 8, dtype=np.int64)
        for word in (at.RECORD, at.CLOCK):
            self._words[word // 8] = context.load_word(word)
        self.context: int = self._words.ctypes.data
        self.lock = threading.RLock()
        self.open = entry_point(message_records.open_remote_message)
        self.come = entry_point(message_records.remote_message_came)
        self.close = entry_point(message_records.close_remote_message)

    def begin(
        self, way: int, dtype_code: int, tag: int, nbytes: int, peer: int | None, background: bool
    ) -> RecordedMessage:
        """Open the record of a message and return it.

        Args:
            way: SENT or RECEIVED (layout.py).
            dtype_code: the dtype's code.
            peer: the other rank; None for any.
            background: the call that begins it does not wait for it.
        """
        what = way | (at.BACKGROUND if background else 0) | dtype_code << 16
        with self.lock:
            message_id = self.open(self.context, what, tag, nbytes, 0 if peer is None else peer + 1)
        return RecordedMessage(self, message_id, nbytes)
