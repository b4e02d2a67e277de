"""Ranks that are behind get the state of those that are ahead: whole, undamaged, or not at all."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import torchestra as dist
from torchestra import elastic
from torchestra.elastic.blocks import BLOCK_BYTES, Block, Piece, TensorBlocks, bytes_of
from worlds import KINDS, Outcome, outcomes, run

LARGE = 9 * BLOCK_BYTES // 4  # in floats: nine blocks


class Gone(Exception):
    """End a rank that leaves."""


class Counter:
    """Have a state without a tensor."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Things:
    """Make a state with a part of each kind; all values are those of ``number``."""

    def __init__(self, number: int) -> None:
        self.module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.module.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.large = torch.zeros(LARGE)
        self.empty = torch.zeros(0, 3)
        self.generator = torch.Generator()
        self.counter = Counter(number)
        self.optimizer = torch.optim.Adam(self.module.parameters())
        if number:
            for each in self.module.parameters():
                each.grad = torch.ones_like(each)
            self.optimizer.step()
        with torch.no_grad():
            for each in (*self.module.parameters(), *self.module.buffers(), self.large):
                each.fill_(number)
        self.generator.manual_seed(number)
        self.state = elastic.State(
            self.module, self.optimizer, self.large, self.empty, rng=self.generator, counter=self.counter
        )

    def check(self, number: int) -> None:
        for each in (*self.module.parameters(), *self.module.buffers(), self.large):
            assert (each == number).all()
        assert self.counter.count == number
        assert self.generator.initial_seed() == number or number == 0
        moments = [each["exp_avg"] for each in self.optimizer.state.values()]
        assert len(moments) == (2 if number else 0)
        for each in moments:
            assert (each == 0.1).all()


def begin_together() -> tuple[int, ...]:
    things = Things(dist.get_rank() + 1)
    address = things.large.data_ptr()
    synced = things.state.sync()
    things.check(1)
    assert things.large.data_ptr() == address, "tensors are loaded in place"
    assert (synced.step, synced.sources) == (0, (0,))
    assert (synced.bytes > 9 * BLOCK_BYTES) == (dist.get_rank() > 0)
    again = things.state.sync()
    assert (again.behind, again.bytes) == ((), 0)
    return synced.behind


@pytest.mark.parametrize("kind", KINDS)
def test_all_begin_with_the_state_of_the_first(kind: str) -> None:
    assert run(kind, 3, begin_together) == [(1, 2)] * 3


def catch_up(steps: list[int | None]) -> tuple[tuple[int, ...], int]:
    step = steps[dist.get_rank()]
    things = Things(step or 0)
    if step is not None:
        things.state.load_state_dict({**things.state.state_dict(), "step": step})
    synced = things.state.sync()
    assert things.state.step == 7
    things.check(7)
    return synced.sources, synced.bytes


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_is_behind_or_new_fetches_from_all_that_are_ahead(kind: str) -> None:
    told = run(kind, 4, catch_up, [7, 6, 7, None])
    assert [sources for sources, _ in told] == [(0, 2)] * 4
    assert [count > 0 for _, count in told] == [False, True, False, True]


def test_between_hosts_only_blocks_that_differ_are_sent() -> None:
    def body() -> int:
        things = Things(2)
        things.large[5:] = torch.arange(LARGE - 5)
        if dist.get_rank() != 1:
            things.large[0] = 9
            things.state.load_state_dict({**things.state.state_dict(), "step": 1})
        count = things.state.sync().bytes
        assert things.large[0] == 9
        return count

    told = outcomes("threads", 3, body, hosts=["a", "b", "b"])
    first, behind, third = (each.result() for each in told)
    assert (first, third) == (0, 0)
    assert 0 < behind < 2.5 * BLOCK_BYTES


def send_damaged(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> list[int]:
    """Have these ranks send what is damaged; return a list that gets the rank of each sending."""
    sent: list[int] = []
    to_send, copy_out = TensorBlocks.to_send, TensorBlocks.copy_out

    def messages(blocks: TensorBlocks, block: Block) -> list[torch.Tensor]:
        sent.append(dist.get_rank())
        found = [each.clone() for each in to_send(blocks, block)]
        if dist.get_rank() in ranks:
            found[-1][-1] ^= 1
        return found

    def copy(blocks: TensorBlocks, block: Block, address: int) -> int:
        sent.append(dist.get_rank())
        checksum = copy_out(blocks, block, address)
        if dist.get_rank() in ranks:
            ctypes.memset(address + bytes_of(block) - 1, 99, 1)
        return checksum

    monkeypatch.setattr(TensorBlocks, "to_send", messages)
    monkeypatch.setattr(TensorBlocks, "copy_out", copy)
    return sent


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_what_arrives_damaged_is_fetched_again_from_another(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    sent = send_damaged(monkeypatch, 0)
    for each in outcomes("threads", 3, catch_up, [7, 7, None], hosts=list(hosts)):
        each.result()
    assert sent.count(1) > sent.count(0) > 0


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_what_arrives_damaged_from_everybody_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    send_damaged(monkeypatch, 0, 1)
    for each in outcomes("threads", 3, catch_up, [7, 7, 6], hosts=list(hosts)):
        assert "arrived with another checksum 4 times, on rank 2" in each.message


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_models_that_differ_are_an_error_on_all(hosts: str) -> None:
    def body() -> None:
        elastic.State(model=nn.Linear(200, 200 + dist.get_rank())).sync()

    zero, one = outcomes("threads", 2, body, hosts=list(hosts))
    text = "rank 1 of group 'default' cannot take over the state of the others: model.weight is of"
    for each, kind in ((zero, dist.DistError), (one, dist.InvalidArgumentError)):
        assert type(each.error) is kind
        assert text in each.message


def test_a_rank_whose_sources_die_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is the only one ahead, and leaves when it has sent a part."""
    copy_out = TensorBlocks.copy_out

    def leave(blocks: TensorBlocks, block: Block, address: int) -> int:
        assert dist.group.WORLD is not None
        if dist.group.WORLD.size() == 3 and len(block) == 1 and block[0].start:
            raise Gone
        return copy_out(blocks, block, address)

    monkeypatch.setattr(TensorBlocks, "copy_out", leave)

    def body() -> None:
        rank = dist.get_rank()
        things = Things(7 if rank == 0 else 6 if rank == 1 else 0)
        if rank < 2:
            things.state.load_state_dict({**things.state.state_dict(), "step": 7 - rank})
        world = dist.group.WORLD
        assert world is not None
        with pytest.raises(dist.GroupAbortedError):
            things.state.sync()
        synced = things.state.sync(world.shrink())
        assert (synced.step, synced.sources) == (6, (0,))
        things.check(6)

    ended: list[Outcome] = outcomes("threads", 3, body)
    assert isinstance(ended[0].error, Gone)
    for each in ended[1:]:
        each.result()


@pytest.mark.parametrize("start", [3, 16])
def test_the_checksum_of_a_block_sees_changed_words_and_misplaced_stretches(start: int) -> None:
    generator, length = torch.Generator().manual_seed(0), 41770  # twice four pages, two pages, and some bytes
    stop = length - 2
    tensors = [
        torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in (length, 77, 7)
    ]
    block = [Piece(0, start, stop), Piece(1, 0, 77), Piece(2, 0, 5)]

    def checksum(*changed: tuple[slice, torch.Tensor]) -> int:
        large = tensors[0].clone()
        for where, value in changed:
            large[where] = value
        return TensorBlocks([large, *tensors[1:]]).checksum(block)

    expected, large = checksum(), tensors[0]
    beside = (slice(0, start), large[:start] + 1), (slice(stop, None), large[stop:] + 1)
    assert checksum(*beside) == expected
    pages = [slice(start + page * 4096, start + (page + 1) * 4096) for page in range(10)]
    for place in (start, *(page.start + 1501 for page in pages), stop - 1):
        assert checksum((slice(place, place + 1), large[place : place + 1] ^ 128)) != expected
    for first, second in itertools.combinations(pages, 2):
        assert checksum((first, large[second]), (second, large[first])) != expected
    assert checksum((slice(start, 40000), large[start + 1 : 40001])) != expected
    for one, other in ((start, start + 8), (start + 5000, start + 7040), (stop - 200, stop - 100)):
        first, second = slice(one, one + 8), slice(other, other + 8)  # words that change places in a page
        assert checksum((first, large[second]), (second, large[first])) != expected
        signs = [
            (slice(each.start + 7, each.stop), large[each.start + 7 : each.stop] ^ 128)
            for each in (first, second)
        ]
        assert checksum(*signs) != expected
    blocks = TensorBlocks(tensors)
    targets = [torch.zeros_like(each) for each in tensors]
    copied, back = bytearray(bytes_of(block)), TensorBlocks(targets)
    address = ctypes.addressof(ctypes.c_char.from_buffer(copied))
    assert blocks.copy_out(block, address) == expected
    assert copied == bytes(large[start:stop]) + bytes(tensors[1]) + bytes(tensors[2][:5])
    assert back.copy_in(block, address) == back.checksum(block) == expected
    torch.testing.assert_close(targets[0][start:stop], large[start:stop])
    assert not any(map(torch.any, (targets[0][:start], targets[0][stop:])))


@pytest.mark.parametrize("wrong", [(), (3,)])
def test_what_has_no_state_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(dist.InvalidArgumentError, match=r"elastic\.State: "):
        elastic.State(*wrong)
