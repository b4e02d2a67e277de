"""send, recv and recv_anysource as methods of a group, and batches of messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from direct import run_direct

import torchestra as dist
from torchestra.communicator import point_to_point
from torchestra.communicator.work import Work
from torchestra.errors import DistError, InvalidArgumentError
from torchestra.tensors import contiguity
from worlds import KINDS, run


def everybody_to_everybody(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    peers = [peer for peer in range(size) if peer != rank]
    outputs = {peer: torch.tensor([-1]) for peer in peers}
    sends = [group.send([torch.tensor([rank])], peer, 0) for peer in peers]
    receives = [group.recv([outputs[peer]], peer, 0) for peer in peers]
    for work in (*sends, *receives):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    assert {peer: output.item() for peer, output in outputs.items()} == {peer: peer for peer in peers}
    for peer, work in zip(peers, receives, strict=True):
        assert work.result()[0] is outputs[peer]
        assert work._source_rank() == work.source_rank() == peer


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_sends_to_every_other(kind: str) -> None:
    run_direct(kind, 4, everybody_to_everybody)


def from_anybody(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    if rank:
        group.send([torch.tensor([rank, 10 * rank])], dstRank=0, tag=7).wait()
        return
    seen = []
    for _ in range(size - 1):
        tensor = torch.zeros(2, dtype=torch.int64)
        work = group.recv_anysource([tensor], 7)
        work.wait()
        assert tensor.tolist() == [work.source_rank(), 10 * work.source_rank()]
        seen.append(work.source_rank())
    assert sorted(seen) == list(range(1, size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_from_any_rank_says_whose_it_is(kind: str) -> None:
    run_direct(kind, 4, from_anybody)


def refuse_messages(group: dist.ProcessGroup) -> None:
    one, peer = torch.zeros(1), 1 - group.rank()
    for tensors in ([], [one, one]):
        with pytest.raises(RuntimeError, match=f"send: takes a single tensor, got {len(tensors)}"):
            group.send(tensors, peer, 0)
        with pytest.raises(RuntimeError, match="recv: takes a single tensor"):
            group.recv(tensors, peer, 0)
        with pytest.raises(RuntimeError, match="recv_anysource: takes a single tensor"):
            group.recv_anysource(tensors, 0)
    for rank in (-1, 2):
        with pytest.raises(RuntimeError, match=f"invalid rank: {rank}"):
            group.send([one], rank, 0)
    with pytest.raises(TypeError, match="`srcRank` must be an int"):
        group.recv([one], "1", 0)
    with pytest.raises(RuntimeError, match="invalid tag: -1"):
        group.recv([one], peer, -1)
    with pytest.raises(RuntimeError, match="only supports dense tensors"):
        group.send([one.to_sparse()], peer, 0)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        group.send(3, peer, 0)
    group.barrier().wait()


def test_messages_that_cannot_be_sent_are_refused() -> None:
    run_direct("threads", 2, refuse_messages)


def ring(by_group_rank: bool) -> None:
    """Each rank receives before it sends, which would hang if either waited for the other."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, received = torch.arange(3.0) + rank, torch.zeros(3)
    if by_group_rank:
        ops = [
            dist.P2POp(dist.irecv, received, group=group, tag=3, group_peer=left),
            dist.P2POp(dist.isend, sent, group=group, tag=3, group_peer=right),
        ]
    else:
        ops = [
            dist.P2POp(dist.irecv, received, group.to_global_rank(left), group),
            dist.P2POp(dist.isend, sent, group.to_global_rank(right), group),
        ]
    assert [(op.peer, op.group_peer) for op in ops] == [(left + 1, left), (right + 1, right)]
    assert repr(ops[0]).startswith(f"P2POp(irecv, group_peer={left}, (3,), torch.float32")
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(received, torch.arange(3.0) + left)


@pytest.mark.parametrize("by_group_rank", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_messages_in_any_order(kind: str, by_group_rank: bool) -> None:
    run(kind, 4, ring, by_group_rank)


def several_in_order() -> None:
    rank = dist.get_rank()
    tensors = [torch.full((2,), float(index)) if rank == 0 else torch.zeros(2) for index in range(5)]
    op = dist.isend if rank == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, 1 - rank) for tensor in tensors]):
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[float(index)] * 2 for index in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_a_batch_from_one_rank_to_another_keep_their_order(kind: str) -> None:
    run(kind, 2, several_in_order)


def bad_batches() -> None:
    tensor, peer = torch.zeros(1), 1 - dist.get_rank()
    with pytest.raises(ValueError, match="Invalid ``op``"):
        dist.P2POp(dist.broadcast, tensor, peer)
    with pytest.raises(TypeError, match="Invalid function argument"):
        dist.P2POp(dist.isend, [tensor], peer)
    with pytest.raises(InvalidArgumentError, match="`peer` or `group_peer`"):
        dist.P2POp(dist.isend, tensor)
    with pytest.raises(InvalidArgumentError, match="`peer` or `group_peer`"):
        dist.P2POp(dist.isend, tensor, peer, group_peer=peer)
    with pytest.raises(InvalidArgumentError, match="global rank 2 is not part of group"):
        dist.P2POp(dist.isend, tensor, 2)
    with pytest.raises(InvalidArgumentError, match="`group_peer` is 2, but the group has ranks 0 to 1"):
        dist.P2POp(dist.isend, tensor, group_peer=2)
    other = dist.new_group([0, 1])
    ops = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.isend, tensor, peer, other)]
    with pytest.raises(ValueError, match="All ops need to use the same group"):
        dist.batch_isend_irecv(ops)
    for bad in (ops[0], [tensor], None):
        with pytest.raises(ValueError, match="Invalid ``p2p_op_list``"):
            dist.batch_isend_irecv(bad)
    assert dist.batch_isend_irecv([]) == []


def test_a_batch_that_cannot_be_run_is_refused() -> None:
    run("threads", 2, bad_batches)


def from_outside() -> list[str]:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return []
    with pytest.warns(UserWarning, match="no member of group") as caught:
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.zeros(1), 0, group)]) == []
    return [str(warning.message) for warning in caught]


def test_a_rank_outside_of_the_group_is_warned() -> None:
    assert len(run("processes", 2, from_outside)[1]) == 1


def receive_what_cannot_be_copied() -> None:
    if dist.get_rank() == 1:
        for value in (1.0, 2.0):
            dist.send(torch.full((3,), value), 0)
        return
    works = [dist.irecv(tensor, 1) for tensor in (torch.zeros(6)[::2], torch.zeros(3))]
    with pytest.raises(MemoryError, match="no memory for a copy"):
        works[0].wait(20)
    works[1].wait()
    assert works[1].result()[0].tolist() == [2.0] * 3


def test_a_message_that_cannot_be_copied_to_its_tensor_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Work ends, and the thread that received it goes on."""

    def write_back(tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors[0].is_contiguous():
            raise MemoryError("no memory for a copy")
        return contiguity.write_back(tensors, buffers)

    monkeypatch.setattr(point_to_point, "write_back", write_back)
    run("threads", 2, receive_what_cannot_be_copied)


def test_a_message_whose_copy_is_interrupted_fails_and_the_interrupt_goes_on() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    work, tensor = Work("irecv"), torch.zeros(1)
    transfer: Any = SimpleNamespace(error=None, source=1)
    with pytest.raises(KeyboardInterrupt):
        point_to_point._end(work, tensor, tensor, interrupted, transfer)
    with pytest.raises(DistError, match="received, but not copied to its tensor: KeyboardInterrupt"):
        work.wait(20)
