"""The outcomes of a test on its ranks, and the test's result that follows from them."""

from __future__ import annotations

import time
import unittest
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchestra.errors import GroupAbortedError
from torchestra.testing.skips import skip_reason


class RankFailure(RuntimeError):
    """At least one rank failed; the message has the traceback of each, that of the first failure at the top.

    Its cause is the exception of the rank that failed first.
    """


@dataclass
class Outcome:
    """The outcome of one rank.

    Attributes:
        error: the exception that the rank raised, or None.
        time: ``time.monotonic()`` when it ended.
        late: whether it had not ended when the time was up.
        where: the line of the test where a late rank was then.
        report: what pytest prints for ``error``, made on the rank that raised it.
    """

    rank: int
    error: BaseException | None = None
    text: str = ""
    time: float = field(default_factory=time.monotonic)
    late: bool = False
    where: str = ""
    report: object = None

    @property
    def skip(self) -> str | None:
        """Return why the rank skipped the test, if it did."""
        if isinstance(self.error, unittest.SkipTest):
            return str(self.error) or "skipped"
        if isinstance(self.error, SystemExit):
            return skip_reason(self.error.code)
        return None

    @property
    def failed(self) -> bool:
        """Return whether the rank neither ended well nor skipped."""
        ended_well = self.error is None or (
            isinstance(self.error, SystemExit) and self.error.code in (None, 0)
        )
        return self.late or not (ended_well or self.skip is not None)

    @property
    def consequence(self) -> bool:
        """Return whether the rank failed only because another rank was gone."""
        return isinstance(self.error, GroupAbortedError)


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the failure that the others followed from, or None if no rank failed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    return min(failed, key=lambda outcome: (outcome.consequence, outcome.late, outcome.time), default=None)


def skip_of(outcomes: Sequence[Outcome]) -> str | None:
    """Return why the test is skipped: a rank skipped it, and others failed at most because that rank left."""
    reasons = [outcome.skip for outcome in outcomes if outcome.skip is not None]
    genuine = any(outcome.failed and not outcome.consequence for outcome in outcomes)
    return reasons[0] if reasons and not genuine else None


def raise_for(outcomes: Sequence[Outcome], what: str, timeout_s: float) -> None:
    """Raise the exception that the outcomes imply, if not all ranks ended well.

    Args:
        what: the word for a rank in messages: ``Thread`` or ``Process``.
        timeout_s: the ranks' time limit, in seconds.

    Raises:
        unittest.SkipTest: a rank skipped the test.
        RankFailure: a rank failed, or did not end in time.
    """
    reason = skip_of(outcomes)
    if reason is not None:
        raise unittest.SkipTest(reason)
    first = first_failure(outcomes)
    if first is None:
        return
    others = [outcome for outcome in outcomes if outcome.failed and outcome is not first]
    lines = []
    for outcome in (first, *others):
        if outcome.late:
            lines.append(
                f"{what} {outcome.rank} terminated or timed out after {timeout_s:g} seconds\n{outcome.text}"
            )
        elif outcome.consequence and outcome is not first:
            lines.append(f"{what} {outcome.rank} was released with: {outcome.error}\n")
        else:
            lines.append(f"{what} {outcome.rank} exited with exception:\n{outcome.text}")
    raise RankFailure("\n".join(lines)) from first.error
