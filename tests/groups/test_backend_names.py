"""Names that programs of torch.distributed have for a backend of the CPU mean torchestra's own engine."""

from __future__ import annotations

import logging

import pytest

import torchestra as dist
from torchestra.process_group import starting
from worlds import run


def make_groups_by_names() -> None:
    for name in ("gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo", "torchestra"):
        dist.init_process_group(name)
        assert dist.get_backend() == "threads"
        group = dist.new_group([0, 1], backend="gloo")
        assert group.backend == "threads"
        dist.destroy_process_group()


def test_gloo_means_the_engine_of_the_rank() -> None:
    run("threads", 2, make_groups_by_names, init=False)
    assert starting.choose_backend("cpu:gloo") == "native"
    assert dist.is_gloo_available()


def test_that_gloo_is_not_used_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    starting._say_what_serves_gloo.cache_clear()
    with caplog.at_level(logging.WARNING):
        starting.choose_backend("gloo")
        starting.choose_backend("cpu:gloo")
    assert caplog.text.count("torchestra's own engine serves it") == 1
