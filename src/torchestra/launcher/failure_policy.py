"""Which failures of ranks end a job."""

from __future__ import annotations

from collections.abc import Sequence

from torchestra.launcher.root_cause import FailedRank, root_cause
from torchestra.launcher.spec import PhaseReached, StoreServed


class FailurePolicy:
    """Decides whether a job goes on after a failure: this one until there are too many.

    A :class:`~torchestra.launcher.job.Job` tells it what happens.

    Args:
        survived: how many failures do not end the job.
    """

    def __init__(self, survived: int) -> None:
        self._survived = survived

    def cause(self, failed: Sequence[FailedRank]) -> FailedRank | None:
        """Return the failure that ends the job; None while it goes on.

        Args:
            failed: the ranks whose present process has failed, in no order.
        """
        return root_cause(failed, self._survived)

    def summary(self) -> str:
        """Return what the last line on a job that ended well says in addition."""
        return ""

    def begun(self) -> None:
        """Note that the ranks are being started."""

    def forked(self, rank: int) -> None:
        """Note that a rank has a process."""

    def store_served(self, served: StoreServed) -> None:
        """Note which processes serve the job's store."""

    def reached(self, rank: int, reached: PhaseReached) -> None:
        """Note that a rank has reached a phase of its membership."""

    def failing(self, rank: int) -> None:
        """Note that a rank has reported the exception that ends it; its process still runs."""

    def ended_well(self, rank: int) -> None:
        """Note that a rank has ended with success."""

    def failed(self, failed: FailedRank) -> None:
        """Note that a rank's process has ended in failure; :meth:`cause` is asked next."""

    def survived(self, failed: FailedRank) -> None:
        """Do what is to be done about a failure that does not end the job."""

    def close(self) -> None:
        """Close what this has opened; the job has ended."""
