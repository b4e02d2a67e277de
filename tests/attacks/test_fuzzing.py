"""Whatever is read where others write, there is a result or an error that is dealt with, soon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tools.fuzzing import Target, feed, inputs
from tools.fuzzing.targets import targets

TARGETS = {target.name: target for target in targets()}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_what_the_product_writes_is_read(target: Target) -> None:
    assert any(feed(target, seed) for seed in target.seeds)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_whatever_is_written_is_read_or_refused(target: Target) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(inputs(target.seeds))
    def run(data: bytes) -> None:
        feed(target, data)

    run()
