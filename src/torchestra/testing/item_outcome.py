"""The meaning of the ranks' outcomes for a pytest test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchestra.testing.outcomes import Outcome, first_failure

_PASSED_ON = (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception, KeyboardInterrupt)


def conclude(item: pytest.Function, outcomes: Sequence[Outcome], kind: str, timeout_s: float) -> None:
    """Raise what the ranks' outcomes mean for the test, and add to its report the others' failures.

    Args:
        kind: of ranks, for messages.
        timeout_s: how long they had, in seconds.
    """
    genuine = [each for each in outcomes if each.failed and not each.consequence]
    passed_on = [each for each in outcomes if isinstance(each.error, _PASSED_ON)]
    if passed_on and all(isinstance(each.error, _PASSED_ON) for each in genuine):
        assert passed_on[0].error is not None
        raise passed_on[0].error
    reason = next((each.skip for each in outcomes if each.skip is not None), None)
    if reason is not None and not genuine:
        pytest.skip(reason)
    shown = _failure_asked_for(item, outcomes) or first_failure(outcomes)
    if shown is None:
        return
    for each in outcomes:
        if each.failed and each is not shown:
            what = f"was released: {each.error}" if each.consequence else each.text
            item.add_report_section("call", f"rank {each.rank} of {len(outcomes)}", what)
    where = f"rank {shown.rank} of {len(outcomes)} {kind}"
    if shown.late:
        pytest.fail(f"{where} had not ended after {timeout_s:g} s.\n{shown.text}", pytrace=False)
    assert shown.error is not None
    if hasattr(shown.error, "add_note"):
        shown.error.add_note(f"on {where}")
    raise shown.error


def _failure_asked_for(item: pytest.Function, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the failure of the rank that the user asked for, if it has one."""
    rank = item.config.getoption("--pdb-rank")
    return next((each for each in outcomes if each.rank == rank and each.failed and not each.late), None)
