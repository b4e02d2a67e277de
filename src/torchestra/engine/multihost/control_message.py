"""The messages by which the failure detectors of a group's ranks speak with each other."""

from __future__ import annotations

from enum import IntEnum


class ControlMessage(IntEnum):
    """The type of a message of the control channel; its text is JSON.

    ``ping`` and ``ack``: ranks that have died, that have left, hosts that are silent; the acknowledgement
    of a ping also the line of the sender's program. ``abort``: why the group is over, the ranks that have
    failed, where ranks stand, and the hosts to tell if there are any; ``confirm``: the sender knows that, and
    other hosts that do. ``ask``: the number of the question and of an operation; ``recount``: of the
    question, and how many entries of each rank to tell; ``answer``: of the question, and then the answer.
    """

    ping = 1
    ack = 2
    abort = 3
    confirm = 4
    ask = 5
    recount = 6
    answer = 7


REPLIES = (ControlMessage.ack, ControlMessage.confirm)
"""What answers a rank that is sure to know the one that sends it."""
