"""Programs that keep files on disks that are full, fail, or forget: runs that have found defects."""

from __future__ import annotations

import pytest

from verification.simulation import files
from verification.simulation.files import HARMFUL, PROGRAMS, first_failure, mutated

_TRIED = 12


@pytest.mark.parametrize("name", HARMFUL)
def test_a_program_that_minds_no_disk_is_found_out(name: str) -> None:
    """Some are defects that there were: so these runs also see that they are mended."""
    seed = HARMFUL[name][0]
    assert first_failure([seed]) is None
    with mutated(name):
        assert first_failure(range(seed, seed + _TRIED * len(PROGRAMS), len(PROGRAMS))) is not None


def test_a_seed_is_one_run() -> None:
    """A failing seed can be replayed."""
    for seed in range(2, 2 + 4 * len(PROGRAMS), len(PROGRAMS)):
        assert files.run(seed).events == files.run(seed).events
