"""The errors of messages, in words."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.transfer import Record, Transfer
from torchestra.errors import DistBackendError, ForkedProcessError, GroupAbortedError, GroupDestroyedError
from torchestra.system.forking import refusal


class MailboxErrors:
    """Makes the errors of one rank's mailbox.

    Args:
        rank: whose it is.
        name: of the group.
        kind_name: what to call a kind.
    """

    def __init__(self, rank: int, name: str, kind_name: Callable[[int], str]) -> None:
        self._rank = rank
        self._kind_name = kind_name
        self._where = f"group {name!r}, rank {rank}"

    def inherited(self) -> ForkedProcessError:
        return refusal(f"{self._where}: no messages can be sent or received")

    def mismatch(self, transfer: Transfer, record: Record) -> DistBackendError:
        sender, length = record.load_word(w.FROM), record.load_word(w.FROM_LENGTH)
        return DistBackendError(
            f"{self._where}: rank {sender} sent {length} bytes of"
            f" {self._kind_name(record.load_word(w.FROM_KIND))} with tag {transfer.tag}, but recv expected"
            f" {transfer.length} bytes of {self._kind_name(transfer.kind)}. The message was thrown away;"
            " size and dtype must be the same on both sides"
        )

    def no_memory(self, transfer: Transfer) -> DistBackendError:
        return DistBackendError(
            f"{self._where}: no memory for a message that came before its receive, in"
            f" {transfer.describe()}; call the receives in the order of the sends"
        )

    def destroyed(self, transfer: Transfer) -> GroupDestroyedError:
        return GroupDestroyedError(f"{self._where}: {transfer.describe()}, but the group was destroyed")

    def left(self, sending: bool, peer: int, error: BaseException) -> str:
        """Return why a channel was given up."""
        what = "send to" if sending else "recv from"
        return f"rank {self._rank} left a {what} rank {peer} halfway, with {type(error).__name__}: {error}"

    def unusable(self, transfer: Transfer, reason: str) -> GroupAbortedError:
        return GroupAbortedError(f"{self._where}: {transfer.describe()} is impossible: {reason}")
