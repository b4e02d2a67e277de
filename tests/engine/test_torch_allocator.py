"""Torch's allocator: which tensors get blocks, when a block is used again, and that nothing else changes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forking import Child
from torchestra.engine.kernels import blocks
from torchestra.engine.memory import torch_allocator
from torchestra.engine.memory.torch_allocator import BlockPool, why_not
from warm_programs import FinalizedWarm, run_warm

LENGTH = 1 << 16
SEED = 11


def block(length: int) -> torch.Tensor:
    """Memory for a block, which is not from torch's allocator."""
    return torch.frombuffer(bytearray(length), dtype=torch.uint8)


@pytest.fixture
def made() -> list[torch.Tensor]:
    """The memory of the blocks of a pool, in their order."""
    return []


@pytest.fixture
def pool(made: list[torch.Tensor]) -> Iterator[BlockPool]:
    assert why_not() == ""

    def make(length: int) -> torch.Tensor:
        made.append(block(length))
        return made[-1]

    found = BlockPool([LENGTH, LENGTH, 2 * LENGTH], make)
    yield found
    found.stop()


def addresses(tensors: list[torch.Tensor]) -> set[int]:
    return {each.data_ptr() for each in tensors}


def test_results_of_a_served_pool_lie_in_blocks_of_their_length(
    pool: BlockPool, made: list[torch.Tensor]
) -> None:
    pool.serve()
    ones = torch.ones(LENGTH // 4)
    product = ones * 2
    both = torch.cat([ones, product])
    pool.stop()
    assert addresses([ones, product, both]) == addresses(made)
    assert float(both.sum()) == 3 * LENGTH / 4
    assert both.untyped_storage().nbytes() == 2 * LENGTH


@pytest.mark.parametrize("length", [0, 1, LENGTH - 1, LENGTH + 1, 3 * LENGTH])
def test_other_lengths_get_ordinary_memory(pool: BlockPool, made: list[torch.Tensor], length: int) -> None:
    pool.serve()
    other = torch.zeros(length, dtype=torch.uint8)
    assert not addresses([other]) & addresses(made)


def test_no_block_is_taken_while_no_pool_or_another_is_served(
    pool: BlockPool, made: list[torch.Tensor]
) -> None:
    other = BlockPool([4 * LENGTH], block)
    before = torch.zeros(LENGTH, dtype=torch.uint8)
    other.serve()
    during = torch.zeros(LENGTH, dtype=torch.uint8)
    other.stop()
    assert not addresses([before, during]) & addresses(made)


def test_a_block_is_used_again_when_the_last_tensor_on_it_has_died(
    pool: BlockPool, made: list[torch.Tensor]
) -> None:
    pool.serve()
    tensors = [torch.zeros(LENGTH, dtype=torch.uint8) for _ in range(3)]
    assert addresses(tensors[:2]) == addresses(made[:2])
    assert not addresses(tensors[2:]) & addresses(made)  # both were taken
    view, address = tensors[0][5:], tensors[0].data_ptr()
    del tensors[0]
    assert torch.zeros(LENGTH, dtype=torch.uint8).data_ptr() != address
    del view
    assert torch.zeros(LENGTH, dtype=torch.uint8).data_ptr() == address


def test_a_tensor_on_a_block_is_as_any_other(pool: BlockPool, made: list[torch.Tensor]) -> None:
    pool.serve()
    tensor = torch.arange(LENGTH // 4, dtype=torch.float32)
    pool.stop()
    assert addresses([tensor]) <= addresses(made)
    expected = torch.arange(LENGTH // 4, dtype=torch.float32)
    assert torch.equal(tensor.clone(), expected)
    assert torch.equal(torch.from_numpy(tensor.numpy()), expected)
    copied = tensor.clone().resize_(LENGTH)
    assert torch.equal(copied[: LENGTH // 4], expected)
    pool.serve()
    longer = tensor + 0
    pool.stop()
    assert addresses([longer]) <= addresses(made)
    longer.resize_(LENGTH)  # takes other memory, and gives the block back
    assert torch.equal(longer[: LENGTH // 4], expected)
    assert not addresses([longer]) & addresses(made)


def test_a_block_can_be_cloned_lazily(pool: BlockPool, made: list[torch.Tensor]) -> None:
    """As what the allocator gave; it is free again when both the tensor and the clone are gone."""
    pool.serve()
    tensor = torch.zeros(LENGTH, dtype=torch.uint8)
    address = tensor.data_ptr()
    assert address in addresses(made)
    clone = torch._lazy_clone(tensor)
    clone += 1  # takes memory of its own
    assert (int(tensor.sum()), int(clone.sum(dtype=torch.int64))) == (0, LENGTH)
    del tensor, clone
    assert torch.zeros(LENGTH, dtype=torch.uint8).data_ptr() == address


def convolved(width: int, serve: Callable[[], None], stop: Callable[[], None]) -> list[torch.Tensor]:
    """The gradients of a convolution, for which oneDNN makes buffers that have the weight's length."""
    generator = torch.Generator().manual_seed(SEED)
    layer = torch.nn.Conv2d(width, width, 3, padding=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    image = torch.randn(2, width, 14, 14, generator=generator)
    serve()
    try:
        layer(image).square().mean().backward()
        layer(image).square().mean().backward()
    finally:
        stop()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("number", [1, 2, 9])
def test_onednn_may_take_blocks_for_its_buffers(number: int) -> None:
    """It takes them by raw_allocate, which was torch's internal error, and frees them by their address."""
    width = 64
    expected = convolved(width, lambda: None, lambda: None)
    pool = BlockPool([4 * width * width * 9] * number, block)
    for _ in range(3):
        found = convolved(width, pool.serve, pool.stop)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_torch_frees_by_address_blocks_and_what_is_none(pool: BlockPool, made: list[torch.Tensor]) -> None:
    """As Allocator::raw_allocate and raw_deallocate do, which nothing in Python calls."""
    allocator, _ = torch_allocator._installed()
    assert allocator is not None
    virtual = ctypes.c_void_p.from_address(allocator.address).value or 0
    functions = (ctypes.c_void_p * torch_allocator._VIRTUAL_FUNCTIONS).from_address(virtual)
    allocate = ctypes.CFUNCTYPE(torch_allocator._DataPtr, ctypes.c_void_p, ctypes.c_size_t)(functions[2] or 0)
    deleter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(functions[4] or 0)(allocator.address)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter or 0)
    pool.serve()
    found = [allocate(allocator.address, length) for length in (LENGTH, LENGTH + 1)]
    pool.stop()
    assert [each.data for each in found] == [each.argument for each in found]
    assert [each.data in addresses(made) for each in found] == [True, False]
    for each in found:
        free(each.data)
    pool.serve()
    assert torch.zeros(LENGTH, dtype=torch.uint8).data_ptr() == found[0].data


def test_memory_that_torch_cannot_get_is_torchs_error(pool: BlockPool) -> None:
    pool.serve()
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_a_pool_tells_of_which_length_it_has_too_few(pool: BlockPool, made: list[torch.Tensor]) -> None:
    pool.serve()
    kept = [torch.zeros(LENGTH, dtype=torch.uint8) for _ in range(2)]
    torch.zeros(3 * LENGTH, dtype=torch.uint8)
    assert pool.missed() == set()
    kept.append(torch.zeros(LENGTH, dtype=torch.uint8))
    pool.stop()
    assert pool.missed() == {LENGTH}
    pool.add([LENGTH])
    pool.serve()
    assert pool.missed() == set()
    kept.append(torch.zeros(LENGTH, dtype=torch.uint8))
    assert addresses(kept[:2] + kept[3:]) == addresses([made[0], made[1], made[3]])
    assert pool.nbytes == 5 * LENGTH


def test_a_closed_pools_memory_goes_when_its_tensors_have_gone() -> None:
    memory: list[weakref.ref[torch.Tensor]] = []

    def make(length: int) -> torch.Tensor:
        tensor = block(length)
        memory.append(weakref.ref(tensor))
        return tensor

    pool = BlockPool([LENGTH, LENGTH], make)
    pool.serve()
    kept = torch.full((LENGTH,), 7, dtype=torch.uint8)
    del pool
    gc.collect()
    assert [each() is None for each in memory].count(False) == 1  # that of the tensor
    assert int(kept.sum(dtype=torch.int64)) == 7 * LENGTH
    other = torch.zeros(LENGTH, dtype=torch.uint8)
    assert not addresses([other]) & addresses([kept])
    del kept
    BlockPool([], block)
    assert all(each() is None for each in memory)


def test_entries_are_used_again() -> None:
    for _ in range(3 * torch_allocator._MOST_BLOCKS // 16):
        pool = BlockPool([LENGTH] * 16, lambda _: torch.empty(0, dtype=torch.uint8))
        assert pool.nbytes == 16 * LENGTH
        del pool


def test_there_are_so_many_blocks_and_no_more() -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    pool = BlockPool([LENGTH] * (torch_allocator._MOST_BLOCKS + 1), lambda _: empty)
    assert pool.nbytes <= torch_allocator._MOST_BLOCKS * LENGTH


def test_a_pool_ends_at_the_first_block_that_there_is_no_memory_for() -> None:
    room = [block(LENGTH), block(LENGTH)]
    pool = BlockPool([LENGTH] * 4, lambda _: room.pop() if room else None)
    assert pool.nbytes == 2 * LENGTH


def test_threads_that_take_and_give_and_pools_that_come_and_go_share_no_block() -> None:
    """Each thread writes its number into its tensor, and finds it there; pools of two lengths alternate."""
    ended = threading.Event()
    wrong: list[str] = []

    def use(number: int) -> None:
        generator = torch.Generator().manual_seed(SEED + number)
        while not ended.is_set():
            length = LENGTH << int(torch.randint(2, (), generator=generator))
            tensor = torch.empty(length, dtype=torch.uint8)
            tensor.fill_(number)
            if int(tensor.min()) != number or int(tensor.max()) != number:
                wrong.append(f"thread {number} found another's writes")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(300):
            pool = BlockPool([LENGTH << turn % 2] * 3, block)
            pool.serve()
            threading.Event().wait(0.001)  # lets the threads run, which is all that it is for
            del pool
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_forked_child_takes_no_block_of_its_parent(pool: BlockPool, made: list[torch.Tensor]) -> None:
    pool.serve()
    known = addresses(made)

    def in_child() -> tuple[bool, bool]:
        inherited = torch.zeros(LENGTH, dtype=torch.uint8).data_ptr() in known
        pool.serve()  # as a backward through the parent's wrapper would
        inherited |= torch.zeros(LENGTH, dtype=torch.uint8).data_ptr() in known
        own = BlockPool([LENGTH], block)
        own.serve()
        served = torch.zeros(LENGTH, dtype=torch.uint8)
        return inherited, served.data_ptr() in known

    assert Child(in_child).result() == (False, False)
    assert addresses([torch.zeros(LENGTH, dtype=torch.uint8)]) <= known


def test_a_process_ends_well_with_tensors_on_blocks() -> None:
    """By the end of its program, by sys.exit() and by os._exit()."""
    program = f"""
import os, sys, torch
from torchestra.engine.memory.torch_allocator import BlockPool, why_not
from warm_programs import FinalizedWarm, run_warm
assert not why_not(), why_not()
make = lambda length: torch.frombuffer(bytearray(length), dtype=torch.uint8)
for end in (lambda: None, lambda: sys.exit(0), lambda: os._exit(0)):
    child = os.fork()
    if not child:
        pool = BlockPool([{LENGTH}] * 2, make)
        pool.serve()
        torch.kept = torch.zeros({LENGTH}, dtype=torch.uint8)  # dies with its module, late
        sys.modules["kept"] = torch.ones({LENGTH}, dtype=torch.uint8)
        end()
        break
    _, status = os.waitpid(child, 0)
    assert status == 0, (end, status)
"""
    run_warm([sys.executable, "-c", program], timeout=60, kind=FinalizedWarm).check_returncode()


def test_an_allocator_that_is_not_torchs_stays_in_place() -> None:
    assert why_not() == ""  # so ours is in use now
    with pytest.raises(torch_allocator._UnknownError, match="has replaced torch's allocator"):
        torch_allocator._checked(ctypes.CDLL("libc10.so"))


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0", "3.0.0a0+git123"])
def test_an_allocator_of_an_untried_version_stays_in_place(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(torch_allocator._UnknownError, match="has not been tried"):
        torch_allocator._checked(ctypes.CDLL("libc10.so"))


def test_the_environment_can_keep_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_ALLOCATOR", "torch")
    with pytest.raises(torch_allocator._UnknownError, match="TORCHESTRA_ALLOCATOR is torch"):
        torch_allocator._checked(ctypes.CDLL("libc10.so"))


def test_without_an_allocator_pools_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_allocator, "_installed", lambda: (None, "as the test wants it"))
    pool = BlockPool([LENGTH], block)
    pool.serve()
    pool.stop()
    assert pool.nbytes == 0
    assert why_not() == "as the test wants it"


class Table:
    """An allocator's words with one entry, of no use to C++."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 16)()
        self.address = ctypes.addressof(self._words)
        self.entry = self.address + blocks.ENTRIES
        self._words[blocks.SERVED // 8] = self._words[blocks.NUMBER // 8] = 1
        self.fill(LENGTH, 1)

    def fill(self, length: int, pool: int) -> None:
        for offset, value in ((blocks.LENGTH, length), (blocks.POOL, pool), (blocks.STATE, blocks.FREE)):
            self._words[(blocks.ENTRIES + offset) // 8] = value


def test_a_block_is_taken_once_and_not_when_retired() -> None:
    table = Table()
    assert blocks.take_block(table.address, LENGTH) == table.entry
    assert blocks.take_block(table.address, LENGTH) == 0
    assert not blocks.retire_block(table.entry)
    blocks.give_block(table.entry)
    assert blocks.retire_block(table.entry)
    assert blocks.take_block(table.address, LENGTH) == 0


def take_interrupted(
    table: Table, step: int, other: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Any]:
    """Take a block, while another thread does something whole before this one's access number ``step``."""
    outcome: list[Any] = []
    accesses = itertools.count()

    def interrupted(name: str) -> Callable[..., int]:
        real = getattr(blocks, name)

        def access(*words: int) -> int:
            if not outcome and next(accesses) == step:
                outcome.append(None)  # from here on accesses are the other's, or come after it
                outcome[0] = other()
            return int(real(*words) or 0)

        return access

    with monkeypatch.context() as patch:
        for name in ("load_acquire", "compare_exchange", "store_release"):
            patch.setattr(blocks, name, interrupted(name))
        patch.setattr(blocks, "_is_of", blocks._is_of.function)
        taken = blocks.take_block.function(table.address, LENGTH)
    return taken, outcome[0] if outcome else "never"


ACCESSES = range(20)  # more than a block takes


@pytest.mark.parametrize("step", ACCESSES)
def test_of_two_threads_one_takes_the_block(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    taken, others = take_interrupted(
        table, step, lambda: blocks.take_block(table.address, LENGTH), monkeypatch
    )
    assert sorted([taken, 0 if others == "never" else others]) == [0, table.entry]


@pytest.mark.parametrize("refilled", [(2 * LENGTH, 1), (LENGTH, 2)])
@pytest.mark.parametrize("step", ACCESSES)
def test_a_block_that_is_retired_and_replaced_meanwhile_is_not_taken(
    step: int, refilled: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table()

    def replace() -> bool:
        retired = bool(blocks.retire_block(table.entry))
        if retired:
            table.fill(*refilled)
        return retired

    taken, replaced = take_interrupted(table, step, replace, monkeypatch)
    if replaced is True:
        assert taken == 0
        length, pool = refilled
        ctypes.c_int64.from_address(table.address + blocks.SERVED).value = pool
        assert blocks.take_block(table.address, length) == table.entry  # it was left as it had been filled
    else:
        assert taken == table.entry
