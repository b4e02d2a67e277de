"""``launch(kind="threads")``: ranks that are threads of this process."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import torchestra as dist
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import InvalidArgumentError, LaunchTimeoutError, RankError
from torchestra.launcher import launch


def test_each_thread_is_a_rank_of_one_world() -> None:
    def work(factor: int) -> tuple[int, int, list[float], str]:
        dist.init_process_group()
        tensor = torch.full((2,), float(dist.get_rank() * factor))
        dist.all_reduce(tensor)
        return dist.get_rank(), dist.get_world_size(), tensor.tolist(), threading.current_thread().name

    results = launch(work, 3, 10, kind="threads")
    assert results == [(rank, 3, [30.0, 30.0], f"torchestra rank {rank}") for rank in range(3)]
    assert not dist.is_initialized(), "the world of the ranks is theirs alone"


def test_the_failed_rank_is_named_and_its_peers_do_not_hang() -> None:
    ended = threading.Semaphore(0)

    def work() -> None:
        try:
            dist.init_process_group()
            if dist.get_rank() == 1:
                raise ValueError("no")
            dist.barrier()
        finally:
            ended.release()

    with pytest.raises(RankError) as caught:
        launch(work, 3, kind="threads")
    assert str(caught.value) == "rank 1 of 3 failed: ValueError: no"
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.traceback.splitlines()[1].endswith("in work")
    assert all(ended.acquire(timeout=60) for _ in range(3)), "a rank hangs"


def test_a_time_out_names_the_ranks_and_where_they_are() -> None:
    end = threading.Event()

    def wait_for_the_end() -> None:
        end.wait()

    def work() -> None:
        here = current_thread_rank()
        if here is None or here.rank != 0:
            wait_for_the_end()

    before = set(threading.enumerate())
    with pytest.raises(LaunchTimeoutError) as caught:
        launch(work, 3, kind="threads", timeout=2)
    end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert caught.value.ranks == (1, 2)
    assert str(caught.value) == (
        "launch: ranks 1, 2 of 3 had not finished after 2 s, and a thread cannot be ended;"
        " raise timeout= if that is not a hang"
    )
    assert "in wait_for_the_end" in caught.value.tracebacks


def test_an_environment_of_their_own_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="ranks that are threads share one environment"):
        launch(print, 2, kind="threads", env={"A": "B"})


def test_lines_bear_the_rank_that_printed_them(capsys) -> None:
    both_here = threading.Barrier(2)

    def speak() -> None:
        rank = current_thread_rank().rank
        both_here.wait(60)
        print("line", rank)
        print("unfinished", rank, end="")
        print("error", rank, file=sys.stderr)

    before = sys.stdout
    launch(speak, 2, kind="threads")
    print("afterwards")
    assert sys.stdout is before
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    words = ("line", "unfinished")
    assert sorted(lines) == [f"[rank {rank}] {word} {rank}" for rank in (0, 1) for word in words]
    assert last == "afterwards"
    assert sorted(err.splitlines()) == ["[rank 0] error 0", "[rank 1] error 1"]
