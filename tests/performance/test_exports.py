"""Schedules in GOAL follow its grammar and can be executed; SimGrid agrees with the simulation."""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from machines import machine

from torchestra.errors import InvalidArgumentError
from torchestra.performance.goal import write_goal
from torchestra.performance.prediction import predict, schedule_of
from torchestra.performance.workload import Operation, Step

MB = 1 << 20
SIMGRID = Path(__file__).parents[2] / ".venv-simgrid"
STEP = Step(0.01, 0.02, 0.001, (MB, MB), (0.01, 0.02))

# The grammar of LogGOPSim's txt2bin.re, of the parts that are used.
OPERATION = re.compile(
    r"(?P<label>[a-zA-Z][a-zA-Z0-9_]*): "
    r"(?:calc (?P<ns>\d+)|(?P<way>send|recv) (?P<nbytes>\d+)b (?P<to>to|from) (?P<peer>\d+) tag (?P<tag>\d+))"
    r" cpu (?P<cpu>\d+)"
)
NEED = re.compile(r"(?P<label>[a-zA-Z]\w*) requires (?P<other>[a-zA-Z]\w*)")


class Program:
    """What one rank does: its operations by label, and the labels that each requires."""

    def __init__(self) -> None:
        self.operations: dict[str, dict[str, str]] = {}
        self.needs: defaultdict[str, set[str]] = defaultdict(set)


def parse(text: str) -> list[Program]:
    """Read a schedule; fails where a line does not follow the grammar, or refers to what there is not."""
    first, *lines = [line for line in text.splitlines() if line]
    found = re.fullmatch(r"num_ranks (\d+)", first)
    assert found
    programs: list[Program] = []
    inside = False
    for line in lines:
        if not inside:
            assert line == f"rank {len(programs)} {{"
            programs.append(Program())
            inside = True
        elif line == "}":
            inside = False
        elif match := NEED.fullmatch(line):
            programs[-1].needs[match["label"]].add(match["other"])
        else:
            match = OPERATION.fullmatch(line)
            assert match, line
            assert match["way"] is None or (match["way"] == "send") == (match["to"] == "to")
            assert match["label"] not in programs[-1].operations
            programs[-1].operations[match["label"]] = {
                k: v for k, v in match.groupdict().items() if v is not None
            }
    assert not inside
    assert len(programs) == int(found[1])
    for program in programs:
        assert set(program.needs) | set().union(*program.needs.values(), set()) <= set(program.operations)
    return programs


def execute(programs: list[Program]) -> int:
    """Run all operations in an order that their needs allow; return how many messages there were."""
    done: list[set[str]] = [set() for _ in programs]
    sent: defaultdict[tuple[int, int, str, str], int] = defaultdict(int)
    messages, progress = 0, True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            for label, operation in program.operations.items():
                if label in done[rank] or not program.needs[label] <= done[rank]:
                    continue
                way = operation.get("way")
                if way == "send":
                    sent[rank, int(operation["peer"]), operation["tag"], operation["nbytes"]] += 1
                    messages += 1
                elif way == "recv":
                    key = int(operation["peer"]), rank, operation["tag"], operation["nbytes"]
                    if not sent[key]:
                        continue
                    sent[key] -= 1
                done[rank].add(label)
                progress = True
    assert all(done[rank] == set(program.operations) for rank, program in enumerate(programs)), "it hangs"
    assert not any(sent.values()), "some messages are not received"
    return messages


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("workload", [[Operation("all_reduce", MB), Operation("barrier", 0)], STEP])
def test_a_schedule_in_goal_can_be_read_and_run(
    hosts: int, ranks: int, workload: list[Operation] | Step, tmp_path: Path
) -> None:
    on = machine(hosts, ranks)
    assert write_goal(tmp_path / "job.goal", schedule_of(workload, on), on) == hosts * ranks
    programs = parse((tmp_path / "job.goal").read_text())
    assert execute(programs) > 0
    seconds = predict(workload, on).seconds
    for program in programs:
        computed: Counter[str] = Counter()
        for each in program.operations.values():
            computed[each["cpu"]] += int(each.get("ns", 0))
        assert 0 < max(computed.values()) * 1e-9 < seconds


def test_goal_needs_every_rank(tmp_path: Path) -> None:
    on = machine(65, 1)
    with pytest.raises(InvalidArgumentError, match="of 65 ranks not every one is recorded"):
        write_goal(tmp_path / "job.goal", schedule_of([Operation("barrier", 0)], on), on)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def simgrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """SimGrid's Python module, as `make .venv-simgrid/.peer` unpacks it, or as it is installed."""
    modules = SIMGRID / "usr/lib/python3/dist-packages"
    if (modules / f"simgrid{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
        libraries = next(SIMGRID.glob("usr/lib/*-linux-gnu"))
        monkeypatch.syspath_prepend(modules)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))  # for the process that replay() starts
    elif importlib.util.find_spec("simgrid") is None:
        pytest.skip("SimGrid's Python module is not here for this Python: make .venv-simgrid/.peer")


@pytest.mark.usefixtures("simgrid")
@pytest.mark.parametrize(
    ("hosts", "ranks", "operation"),
    [(2, 1, "barrier"), (2, 2, "all_reduce:1MB"), (3, 2, "all_reduce:4MB"), (2, 2, "broadcast:4MB")],
)
def test_simgrid_agrees(hosts: int, ranks: int, operation: str) -> None:
    from torchestra.performance.simgrid_replay import replay

    on, workload = machine(hosts, ranks), [Operation.parse(operation)]
    assert replay(schedule_of(workload, on), on) == pytest.approx(predict(workload, on).seconds, rel=0.15)
