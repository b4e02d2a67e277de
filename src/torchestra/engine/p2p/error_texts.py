"""The errors of messages, in words."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.transfer import RankName, Record, Transfer
from torchestra.errors import DistBackendError, ForkedProcessError, GroupAbortedError, GroupDestroyedError
from torchestra.system.forking import refusal


class MailboxErrors:
    """Makes the errors of one rank's mailbox.

    Args:
        rank: whose it is.
        name: of the group.
        kind_name: what to call a kind.
        rank_name: what to call a rank.
    """

    def __init__(self, rank: int, name: str, kind_name: Callable[[int], str], rank_name: RankName) -> None:
        self._rank, self._name = rank, name
        self._kind_name, self._rank_name = kind_name, rank_name

    @property
    def _where(self) -> str:
        return f"group {self._name!r}, {self._rank_name(self._rank)}"

    def inherited(self) -> ForkedProcessError:
        return refusal(f"{self._where}: no messages can be sent or received")

    def mismatch(self, transfer: Transfer, record: Record) -> DistBackendError:
        sender, length = record.load_word(w.FROM), record.load_word(w.FROM_LENGTH)
        return DistBackendError(
            f"{self._where}: {self._rank_name(sender)} sent {length} bytes of"
            f" {self._kind_name(record.load_word(w.FROM_KIND))} with tag {transfer.tag}, but recv expected"
            f" {transfer.length} bytes of {self._kind_name(transfer.kind)}. The message was thrown away;"
            " size and dtype must be the same on both sides"
        )

    def no_memory(self, transfer: Transfer) -> DistBackendError:
        return DistBackendError(
            f"{self._where}: no memory for a message that came before its receive, in"
            f" {transfer.describe(self._rank_name)}; call the receives in the order of the sends"
        )

    def destroyed(self, transfer: Transfer) -> GroupDestroyedError:
        what = transfer.describe(self._rank_name)
        return GroupDestroyedError(f"{self._where}: {what}, but the group was destroyed")

    def left(self, sending: bool, peer: int, error: BaseException) -> str:
        """Return why a channel was given up."""
        what = f"{'send to' if sending else 'recv from'} {self._rank_name(peer)}"
        return f"{self._rank_name(self._rank)} left a {what} halfway, with {type(error).__name__}: {error}"

    def unusable(self, transfer: Transfer, reason: str) -> GroupAbortedError:
        what = transfer.describe(self._rank_name)
        return GroupAbortedError(f"{self._where}: {what} is impossible: {reason}")
