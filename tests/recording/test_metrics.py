"""``torchestra metrics`` beside a job, read by the clients' own parsers; and what ranks count for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

import torchestra as dist
from interrupts import lose_an_interrupt
from torchestra.cli import main
from torchestra.engine.recorder.flight_entries import ExecutedCalls, RankRecord, Tally
from torchestra.engine.recorder.flight_record import FlightRecord
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.monitor import metrics
from warm_programs import WarmProgram
from worlds import KINDS, ProcessWorld, await_note, leave_note, processes, run

SOON = 90.0
LONG = 600.0  # the tests' time-outs come before
Labels = dict[str, str]


def some_of_each() -> dict[tuple[str, int | None, bool], Tally]:
    """Returns the tallies of this rank."""
    rank = dist.get_rank()
    for count in (1, 256, 257, 1 << 14, (1 << 14) + 1, 1 << 18, (1 << 22) + 1):
        dist.all_reduce(torch.ones(count))
    dist.broadcast(torch.ones(4), 0)
    for _ in range(3):
        if rank == 0:
            dist.send(torch.ones(10), 1)
        else:
            dist.recv(torch.ones(10), 0)
    return {
        (tally.kind, tally.most_bytes, tally.remote): tally
        for tally in dist.flight_record().ranks[rank].tallies
    }


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_count_by_kind_and_size(kind: str) -> None:
    for rank, found in enumerate(run(kind, 2, some_of_each)):
        reduced = {most: tally for (name, most, _), tally in found.items() if name == "all_reduce"}
        assert {most: tally.calls for most, tally in reduced.items()} == {
            1 << 10: 2,
            1 << 16: 2,
            1 << 20: 2,
            None: 1,
        }
        assert reduced[1 << 16].nbytes == 4 * (257 + (1 << 14))
        assert all(0 <= tally.waited <= tally.seconds < SOON for tally in found.values())
        way = "send" if rank == 0 else "recv"
        assert (found[way, 1 << 10, False].calls, found[way, 1 << 10, False].nbytes) == (3, 120)
        assert found["broadcast", 1 << 10, False].calls == 1


def work_and_hang() -> None:
    rank = dist.get_rank()
    for _ in range(20):
        if rank == 1:
            time.sleep(0.005)  # the subject, not a way to wait for somebody
        dist.all_reduce(torch.ones(1000))
    if rank == 1:
        while dist.flight_record().ranks[0].operations[-1].kind != "barrier":
            time.sleep(0.002)
        leave_note("rank 0 waits")
        await_note("end", LONG)
    dist.barrier()


@pytest.fixture(scope="module")
def job() -> Iterator[ProcessWorld]:
    """Rank 0 waits for rank 1, which was always late."""
    with processes(2, work_and_hang, timeout=LONG) as world:  # no rank gives up while tests look
        world.await_file("rank 0 waits")
        yield world
        Path(world.path("end")).touch()


def parsed(text: str, job: ProcessWorld) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The values of a job, without its label."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels["job"] in map(str, job.pids):
                labels = {name: value for name, value in sample.labels.items() if name != "job"}
                found[sample.name, frozenset(labels.items())] = sample.value
    return found


def check(text: str, job: ProcessWorld) -> None:
    found = parsed(text, job)
    for rank in "01":
        own = {"group": "default", "rank": rank}
        small = frozenset({**own, "operation": "all_reduce", "size": "64 KiB"}.items())
        assert found["torchestra_operations_total", small] == 20
        assert found["torchestra_operation_bytes_total", small] == 20 * 4000
        waited = found["torchestra_operation_waiting_seconds_total", small]
        assert 0 <= waited <= found["torchestra_operation_seconds_total", small]
        assert found["torchestra_rank_up", frozenset(own.items())] == 1, text
    zero = {"group": "default", "rank": "0"}
    late = found["torchestra_waiting_for_seconds_total", frozenset({**zero, "peer": "1"}.items())]
    assert late > 0
    assert found["torchestra_running_seconds", frozenset(zero.items())] > 0
    assert found["torchestra_group_aborted", frozenset({"group": "default"}.items())] == 0


def test_prometheus_reads_what_is_printed(job: ProcessWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--once"]) == 0
    check(capsys.readouterr().out, job)


def started(*arguments: str) -> WarmProgram:
    command = [sys.executable, "-m", "torchestra", "metrics", *arguments]
    return WarmProgram(command, stdout=subprocess.PIPE, text=True)


def test_prometheus_reads_what_is_served_and_ctrl_c_ends_it(job: ProcessWorld) -> None:
    with started("--port", "0") as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().rpartition(" ")[2].strip()
            with urllib.request.urlopen(address, timeout=SOON) as answer:
                check(answer.read().decode(), job)
        finally:
            server.send_signal(2)
        assert server.wait(SOON) == 0


def test_an_address_of_ipv6_is_printed_as_a_browser_takes_it() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    with started("--address", "::1", "--port", "0") as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            with urllib.request.urlopen(url, timeout=SOON) as answer:
                assert answer.status == 200
        finally:
            server.send_signal(2)
        assert server.wait(SOON) == 0


@pytest.mark.parametrize("port", ["that another program has", "that there is not"])
def test_an_address_that_cannot_be_served_is_named(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = 70_000 if "not" in port else other.getsockname()[1]
        assert main(["metrics", "--port", str(number)]) == 1
    assert f"cannot serve at 127.0.0.1, port {number}: " in capsys.readouterr().err


def test_node_exporter_finds_a_whole_file(job: ProcessWorld, tmp_path: Path) -> None:
    path = tmp_path / "torchestra.prom"
    with started("--textfile", str(path), "--interval", "0.01") as writer:
        try:
            deadline = time.monotonic() + SOON
            while not path.exists():
                assert time.monotonic() < deadline
                assert writer.poll() is None
                time.sleep(0.01)
            for _ in range(20):
                check(path.read_text(), job)
        finally:
            writer.send_signal(2)
        assert writer.wait(SOON) == 0
    assert os.listdir(tmp_path) == ["torchestra.prom"]


def test_an_interrupt_amid_a_finalizer_ends_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There what it raises is lost, and finalizers run whenever a job has been looked at."""

    texts: list[str] = []

    def text(_: object) -> str:
        assert len(texts) < 3, "the interrupt was lost"
        texts.append("# some")
        lose_an_interrupt()
        return texts[-1]

    monkeypatch.setattr(metrics, "_text", text)
    path = tmp_path / "torchestra.prom"
    assert main(["metrics", "--textfile", str(path), "--interval", "0.001"]) == 0
    assert (path.read_text(), len(texts)) == ("# some", 1)


def test_opentelemetry_observes_the_same(job: ProcessWorld) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    metrics.observe(provider.get_meter("test"))
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    assert found["torchestra.operation.seconds"].unit == "s"
    counted = [
        point.value
        for point in found["torchestra.operations"].data.data_points
        if point.attributes["job"] in map(str, job.pids) and point.attributes["operation"] == "all_reduce"
    ]
    assert counted == [20, 20]


def test_a_port_in_use_and_a_missing_client_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["metrics", "--port", str(taken.getsockname()[1])]) == 1
    assert "Address already in use" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["metrics", "--once"]) == 1
    assert "pip install 'torchestra[metrics]'" in capsys.readouterr().err


def look_at_itself() -> tuple[int, int]:
    """How many descriptors a process has open that is itself a rank, after few looks and after more."""
    dist.barrier()
    counts = [0, 0]
    for when in range(2 if dist.get_rank() == 0 else 0):
        for _ in range(5):
            list(metrics.samples())
        counts[when] = len(os.listdir("/proc/self/fd"))
    dist.barrier()
    return counts[0], counts[1]


def test_looking_again_and_again_keeps_nothing_open(job: ProcessWorld) -> None:
    """Also of one's own arena, of which no descriptor may be closed while a rank here holds it."""
    few, more = run("threads", 2, look_at_itself)[0]
    assert 0 < more <= few


def test_calls_by_rpc_are_counted() -> None:
    calls = (ExecutedCalls(0, "fetch", 7, 0.5), ExecutedCalls(-1, "other functions", 2, 0.25))
    rank = RankRecord(1, 1, "present", (), (), 0, 0, 0, 0, 0.0, 0.0, (), None, None, calls=calls)
    record = FlightRecord("rpc", 2, 0.0, 0.0, None, (rank,))
    found = {
        (family, labels): number
        for family, labels, number in metrics._of_rank(record, rank, ("1", "rpc", "1"))
    }
    assert found[metrics.CALLS, ("1", "rpc", "1", "0", "fetch")] == 7
    assert found[metrics.CALL_SECONDS, ("1", "rpc", "1", "several", "other functions")] == 0.25


def test_what_is_queued_and_alive_is_told() -> None:
    rank = RankRecord(
        1, 1, "present", (), (), 0, 0, 0, 0, 0.0, 0.0, (), None, None,
        queued=3, calls_in_flight=4, references_owned=5, references_used=6, calls_made=7, calls_sent_bytes=8,
    )  # fmt: skip
    record, labels = FlightRecord("rpc", 2, 0.0, 0.0, None, (rank,)), ("1", "rpc", "1")
    found = {(family, labels): number for family, labels, number in metrics._of_rank(record, rank, labels)}
    assert found[metrics.QUEUED, labels] == 3
    assert found[metrics.CALLS_IN_FLIGHT, labels] == 4
    assert found[metrics.REFERENCES, (*labels, "owned")] == 5
    assert found[metrics.REFERENCES, (*labels, "used")] == 6
    assert found[metrics.CALLS_MADE, labels] == 7
    assert found[metrics.CALLS_SENT, labels] == 8


def of_groups(name: str) -> dict[tuple[metrics.MetricFamily, tuple[str, ...]], float]:
    """The samples of a group of this process, without the job."""
    return {
        (family, labels[1:]): number for family, labels, number in metrics.samples() if labels[1:2] == (name,)
    }


def loses_a_rank() -> dict[tuple[metrics.MetricFamily, tuple[str, ...]], float]:
    group = dist.new_group([0, 1, 2], group_desc="shrinks")
    dist.barrier()  # all have it
    if dist.get_rank() == 2:
        dist.barrier()
        return {}
    smaller = group.shrink(exclude=[2])
    found = of_groups(smaller.group_name) if dist.get_rank() == 0 else {}
    dist.barrier()
    return found


def test_changes_of_membership_are_counted() -> None:
    found = run("threads", 3, loses_a_rank)[0]
    ((name,),) = [labels for family, labels in found if family is metrics.GENERATION]
    changes = metrics.GENERATION, metrics.SHRINKS, metrics.GROWS
    assert [found[family, (name,)] for family in changes] == [1, 1, 0]


def names_of_groups(make: Callable[[str], dist.ProcessGroup]) -> list[list[tuple[str, float]]]:
    """The groups that this process has made directly, and how many barriers rank 0 has made in each."""

    def look() -> list[tuple[str, float]]:
        dist.barrier()
        found = [
            (labels[1], number)
            for family, labels, number in metrics.samples()
            if family is metrics.OPERATIONS
            and labels[1].startswith("direct")
            and labels[2:4] == ("0", "barrier")
        ]
        dist.barrier()
        return sorted(found)

    first, second = make("a"), make("b")
    meets = first.group_name == second.group_name
    second.barrier()
    both = look()
    if dist.get_rank() == 0:
        second.destroy()
    being_left = look()
    if dist.get_rank() == 1:
        second.destroy()
    first.destroy()
    return [both, being_left] if meets else []


def directly(name: str) -> dist.ProcessGroup:
    here = current_thread_rank()
    assert here is not None
    return dist.ProcessGroup(dist.PrefixStore(name, here.store), here.rank, here.size, SOON)


def test_groups_of_one_name_are_told_apart() -> None:
    both, being_left = run("threads", 2, names_of_groups, directly)[0]
    assert [name for name, _ in both] == ["direct-1", "direct-1 (2)"]
    assert both[0][1] == both[1][1] + 1, "the newest has the name"
    assert [name for name, _ in being_left] == ["direct-1"]


def test_members_and_restarts_of_an_elastic_job_are_counted() -> None:
    members = [{"state": state} for state in ("trains", "joins", "trains")]
    told = metrics._of_membership("7", {"members": members, "restarted": 4})
    found = {(family, labels): number for family, labels, number in told}
    assert found[metrics.MEMBERS, ("7", "trains")] == 2
    assert found[metrics.MEMBERS, ("7", "joins")] == 1
    assert found[metrics.MEMBERS, ("7", "dead")] == 0  # and not a count that is left from before
    assert found[metrics.RESTARTS, ("7",)] == 4


def test_a_collection_looks_for_jobs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def samples() -> Iterator[metrics.Sample]:
        looks.append(1)
        yield metrics.UP, ("7", "default", "0"), len(looks)

    monkeypatch.setattr(metrics, "samples", samples)
    snapshot = metrics._Snapshot()
    for number in (1, 2, 3):
        for family in metrics.FAMILIES:
            expected = [(metrics.UP, ("7", "default", "0"), number)] if family is metrics.UP else []
            assert snapshot.of(family) == expected
    assert len(looks) == 3
