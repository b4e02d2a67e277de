"""Conclude the outcome of a pytest test from those of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchestra.launcher.failure_report import ranks_phrase
from torchestra.system.user_frames import end_in_users_code
from torchestra.testing.outcomes import Outcome, first_failure

_PASSED_ON = (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception, KeyboardInterrupt)


def conclude(item: pytest.Function, outcomes: Sequence[Outcome], kind: str, timeout_s: float) -> None:
    """Raise the exception that the outcomes imply, if any, and add the other ranks' failures to the report.

    Args:
        kind: the kind of ranks, for messages.
        timeout_s: the ranks' time limit, in seconds.
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
    if shown.error is not None and not item.config.getoption("fulltrace"):
        end_in_users_code(shown.error)
    _add_sections(item, outcomes, shown)
    if shown.late:
        pytest.fail(_lateness(outcomes, kind, timeout_s), pytrace=False)
    assert shown.error is not None
    note(item, shown.error, f"on rank {shown.rank} of {len(outcomes)} {kind}")
    ended = [each.rank for each in outcomes if not each.failed and each.skip is None]
    if shown.consequence and ended:
        item.add_report_section("call", f"{ranks_phrase(ended)} of {len(outcomes)}", "had ended the test")
    raise shown.error


def note(item: pytest.Function, error: BaseException, text: str) -> None:
    """Add a text to the report of an error, such as the rank it comes from."""
    if not hasattr(error, "add_note"):  # Python 3.10
        item.add_report_section("call", "failure", text)
    elif text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def report_of_error(item: pytest.Function, error: BaseException) -> object:
    """Return pytest's report of an error; tracebacks of torchestra's own errors end in the test."""
    if not item.config.getoption("fulltrace"):
        end_in_users_code(error)
    return item.repr_failure(pytest.ExceptionInfo.from_exception(error))


def _add_sections(item: pytest.Function, outcomes: Sequence[Outcome], shown: Outcome) -> None:
    """Add the other ranks' failures to the report of a failure, without repeating what it already says."""
    said = shown.text if shown.error is None else str(shown.error)
    ranks_by_text: dict[str, list[int]] = {}
    for each in outcomes:
        if each.failed and (each.late or each is not shown):
            text = _text_of(item, each, shown, said)
            ranks_by_text.setdefault(text, []).append(each.rank)
            said += text
    for text, ranks in ranks_by_text.items():
        item.add_report_section("call", f"{ranks_phrase(ranks)} of {len(outcomes)}", text)


def _text_of(item: pytest.Function, outcome: Outcome, shown: Outcome, said: str) -> str:
    if outcome.late or outcome.error is None:
        return outcome.text
    if outcome.consequence:
        first, *lines = str(outcome.error).splitlines()
        return "\n".join([f"was released: {first}", *(line for line in lines if line not in said)])
    if str(outcome.error) and str(outcome.error) in said:
        return "failed likewise"
    report = _report(item, outcome)
    site = report.rstrip().rpartition("\n")[2]  # "test_it.py:27: AssertionError"
    if site and site in _report(item, shown):
        return f"failed in the same line: {str(outcome.error).partition(chr(10))[0]}"
    return report


def _report(item: pytest.Function, outcome: Outcome) -> str:
    if outcome.report is None and outcome.error is not None:
        outcome.report = report_of_error(item, outcome.error)
    return str(outcome.report)


def _lateness(outcomes: Sequence[Outcome], kind: str, timeout_s: float) -> str:
    """Return a text that names the ranks that had not ended, and the line where each was."""
    late = [each for each in outcomes if each.late]
    ranks = ranks_phrase([each.rank for each in late])
    lines = [f"{ranks} of {len(outcomes)} {kind} had not ended after {timeout_s:g} s:"]
    return "\n".join([*lines, *(f"  rank {each.rank}: {each.where}" for each in late)])


def _failure_asked_for(item: pytest.Function, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the failure of the rank that the user asked for, if it has one."""
    rank = item.config.getoption("--pdb-rank")
    return next((each for each in outcomes if each.rank == rank and each.failed and not each.late), None)
