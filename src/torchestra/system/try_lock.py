"""A lock that is taken if it is free and never waited for, and that no interrupt leaves taken.

``lock.acquire(False)`` of :mod:`threading` has a moment in which a signal's handler may raise: after the lock
was taken, and before the program has noted that. A ``finally`` then cannot know whether the lock is to be
released: released too seldom it stays taken for ever, too often it is taken from another thread.

Here the holder of the lock is one attribute, set to the caller's own object or not at all; so the caller's
``finally`` can look at it. It does so by the two lines below and not by a method: they call nothing, so that
CPython (from 3.11 on) handles no signal between them, nor before them.
"""

from __future__ import annotations


class TryLock:
    """A lock to try, used as follows::

        claim = object()
        try:
            if lock.take(claim):
                ...
        finally:
            if lock.holder is claim:
                del lock.holder

    Taking it twice on one thread fails, as on two.

    Attributes:
        holder: the claim that has the lock; None while it is free. Only the holder deletes it.
    """

    holder: object = None  # found while the object itself has no such attribute

    def take(self, claim: object) -> bool:
        """Take the lock for a claim, an object of this call alone, if it is free; return whether it was.

        An interrupt may leave this with the lock taken.
        """
        # One step, with no other thread between looking and setting: dict.setdefault() is atomic.
        return self.__dict__.setdefault("holder", claim) is claim
