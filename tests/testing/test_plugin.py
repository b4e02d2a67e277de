"""The pytest plugin, as its users see it: test files of theirs, run by a pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import torchestra
from warm_programs import NestedWarm, WarmProgram

pytest_plugins = ("pytester",)

INSTALLED = any(point.value == "torchestra.testing.plugin" for point in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "torchestra.testing.plugin")
SOURCE = str(Path(torchestra.__file__).parents[1])
HEAD = "import pytest, torch\nimport torchestra as dist\nfrom torchestra.testing import fixture\n"


@pytest.fixture(autouse=True)
def _apart_the_same_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    """Run a test file in this process: enough for ranks that are threads."""
    pytester.makepyfile(HEAD + source)
    return pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", *arguments)


def run_apart(
    pytester: pytest.Pytester,
    source: str,
    *arguments: str,
    typed: str = "",
    kind: type[WarmProgram] = WarmProgram,
) -> pytest.RunResult:
    """Run a test file in a process of its own, which no other test has left threads in."""
    pytester.makepyfile(HEAD + source)
    options = (*PLUGIN, "-p", "no:cacheprovider", f"--basetemp={pytester.path / 'temporary'}")
    began = time.monotonic()
    program = kind(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=pytester.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out, _ = program.communicate(typed)
    return pytest.RunResult(program.returncode, out.splitlines(), [], time.monotonic() - began)


def test_a_marked_test_runs_on_every_rank_once_per_size(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
seen = []

@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("x", [1.0, 2.0])
def test_sum(x):
    tensor = torch.full((2,), x)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [x * dist.get_world_size()] * 2
    seen.append(dist.get_rank())

@pytest.mark.ranks(4)
def test_plain():
    assert dist.get_world_size() == 4

def test_unmarked():
    assert not dist.is_initialized()
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 2

@pytest.mark.ranks(2, init=False)
def test_without_a_group():
    assert not dist.is_initialized()
    dist.init_process_group()
    assert dist.get_world_size() == 2
""",
        "-v",
    )
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*test_sum?2-threads-1.0?*", "*test_plain PASSED*"])


def test_the_first_failure_is_shown_with_its_assertion_and_output(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(3)
def test_it():
    rank = dist.get_rank()
    print("hello from", rank)
    dist.barrier()
    if rank == 1:
        values = [1, 2]
        assert values == [1, 3]
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*assert [[]1, 2[]] == [[]1, 3[]]*",
            "*on rank 1 of 3 threads*",
            "*stdout of rank 0*",
            "hello from 0",
            "*rank 0 of 3*",
            "was released: *rank 1*",
        ]
    )


def test_fixtures_are_made_on_every_rank_or_once_for_the_world(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
import pytest

@pytest.fixture
def overridden():
    return "outer"
"""
    )
    result = run(
        pytester,
        """
made, taken_down = [], []

@pytest.fixture
def own(request):
    rank = dist.get_rank()
    made.append(rank)
    request.addfinalizer(lambda: taken_down.append(("finalizer", rank)))
    yield [rank]
    taken_down.append(("generator", rank))

@pytest.fixture(params=["a", "b"])
def letter(request):
    return request.param

@pytest.fixture
def overridden(overridden):
    return overridden + f" inner {dist.get_rank()}"

@fixture(scope="world")
def shared():
    assert not dist.is_initialized()
    return []

@pytest.fixture(scope="module")
def of_the_module():
    return object()

@pytest.mark.ranks(2)
def test_it(own, letter, overridden, shared, of_the_module, tmp_path, monkeypatch):
    rank = dist.get_rank()
    assert own == [rank] and letter in "ab" and overridden == f"outer inner {rank}"
    shared.append((rank, id(of_the_module), id(monkeypatch)))
    dist.barrier()
    assert sorted(each[0] for each in shared) == [0, 1]
    assert len({each[1] for each in shared}) == 1
    assert len({each[2] for each in shared}) == 2
    assert tmp_path.name == f"rank{rank}" and tmp_path.is_dir()

class TestClass:
    @pytest.fixture(autouse=True)
    def of_the_class(self):
        self.rank = dist.get_rank()

    def setup_method(self):
        self.set_up = dist.get_rank()

    @pytest.mark.ranks(2)
    def test_every_rank_has_an_instance(self):
        dist.barrier()
        assert self.rank == self.set_up == dist.get_rank()

def test_afterwards():
    assert sorted(made) == [0, 0, 1, 1]
    assert sorted(taken_down) == [(how, r) for how in ("finalizer", "generator") for r in (0, 0, 1, 1)]
""",
    )
    result.assert_outcomes(passed=4)


def test_outcomes_other_than_failing_pass_through(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import unittest

@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_one_rank_skips():
    if dist.get_rank() == 1:
        pytest.skip("only there")
    dist.barrier()

@pytest.mark.ranks(2)
def test_unittest_skip():
    raise unittest.SkipTest("so")

@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="marked")
def test_skipif():
    raise AssertionError

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_xfail():
    dist.barrier()
    if dist.get_rank() == 0:
        1 / 0
    dist.barrier()

@pytest.mark.ranks(2)
def test_xfail_by_calling():
    pytest.xfail("expected")
""",
    )
    result.assert_outcomes(skipped=4, xfailed=2)


def test_a_hang_is_reported_by_the_engine_with_who_waits_for_whom(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import threading
release = threading.Event()

@pytest.mark.ranks(2, timeout=4)
def test_hang():
    if dist.get_rank() == 1:
        release.wait(100)
    else:
        dist.barrier()

def test_release():
    release.set()
""",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*CollectiveTimeoutError*rank 1*"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "say how many"),
        ("0", "say how many"),
        ("2, kind='fibers'", "kind must be"),
        ("2, colour='red'", "unknown arguments colour"),
        ("2, world='moon'", "world must be"),
        ("2, world='torch', kind='threads', init=False", "use kind='processes'"),
    ],
)
def test_a_marker_that_makes_no_sense_is_refused(
    pytester: pytest.Pytester, arguments: str, complaint: str
) -> None:
    result = run(pytester, f"@pytest.mark.ranks({arguments})\ndef test_it():\n    pass\n")
    assert result.ret != 0
    assert complaint in result.stdout.str() + result.stderr.str()


def test_with_s_lines_are_prefixed(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it():\n    print('here', dist.get_rank())\n"
    result = run(pytester, source, "-s")
    result.stdout.fnmatch_lines_random(["*[[]rank 0[]] here 0", "*[[]rank 1[]] here 1"])


PROCESSES = """
import os, signal, sys

pytestmark = pytest.mark.ranks(2, kind="processes", timeout=100)

@pytest.fixture
def own():
    yield [dist.get_rank(), os.getpid()]
    print("taken down")

@fixture(scope="world")
def shared():
    return {"made in": os.getpid()}

def test_passes(own, shared, tmp_path):
    assert own == [dist.get_rank(), os.getpid()]
    assert shared["made in"] != os.getpid()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    (tmp_path / "file").write_text("mine")
    assert os.environ["RANK"] == str(dist.get_rank())

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.ranks(1, 3, kind=("threads", "processes"))
def test_both(x):
    assert dist.get_world_size() in (1, 3)

def test_fails(own):
    print("about to fail", dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 1:
        numbers = [1, 2]
        assert numbers == [1, 3]
    dist.barrier()

def test_dies():
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.ranks(3, kind=("threads", "processes"), may_die=[1])
def test_survives():
    from torchestra.testing import faults
    with faults.kill(rank=1, at="barrier"), pytest.raises(dist.GroupAbortedError, match="rank 1"):
        dist.barrier()

def test_skips():
    pytest.skip("not today")

@pytest.mark.xfail(raises=KeyError, strict=True)
def test_xfails():
    raise KeyError("gone")

@pytest.mark.ranks(2, kind="processes", timeout=4, init=False)
def test_hangs():
    import time
    if os.environ["RANK"] == "1":
        time.sleep(100)

def test_leaves():
    sys.exit(0)
"""


def test_ranks_as_processes(pytester: pytest.Pytester) -> None:
    result = run_apart(pytester, PROCESSES, "-v", "-rf")
    result.assert_outcomes(passed=12, failed=3, skipped=1, xfailed=1)
    text = result.stdout.str()
    assert "assert [1, 2] == [1, 3]" in text
    assert "about to fail 1" in text
    assert "taken down" in text
    assert "the process of rank 0 ended with signal 9" in text
    assert "rank 1 of 2 processes had not ended after 7 s" in text
    assert "in test_hangs" in text


def test_stopping_at_the_first_failure_and_choosing_tests(pytester: pytest.Pytester) -> None:
    source = "".join(
        f"@pytest.mark.ranks(2)\ndef test_{name}():\n    assert {value}\n"
        for name, value in (("good", True), ("bad", False), ("never", True))
    )
    run(pytester, source, "-x").assert_outcomes(passed=1, failed=1)
    run(pytester, source, "-k", "never").assert_outcomes(passed=1, deselected=2)


def test_a_debugger_looks_at_the_rank_that_failed(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(3)
def test_it():
    rank = dist.get_rank()
    dist.barrier()
    secret = 41 + rank
    assert rank == 0
"""
    result = run_apart(pytester, source, "--pdb", "--pdb-rank", "2", typed="p 'secret is', secret\nq\n")
    assert "('secret is', 43)" in result.stdout.str()


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks at processes")
def test_works_beside_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    arguments = ("-n", "2", "-k", "passes or both or skips")
    result = run_apart(pytester, PROCESSES, *arguments, kind=NestedWarm)  # so are xdist's workers
    result.assert_outcomes(passed=9, skipped=1)


def test_the_plugin_costs_a_run_without_ranks_no_import_of_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


TORCH_WORLD = """
import gc, os, threading, time
import torch.distributed as td
from torch.nn.parallel import DistributedDataParallel

both = pytest.mark.ranks(2, world="torch", kind=("processes", "threads"), timeout=100)

@both
def test_in_the_default_group_of_torch():
    assert td.get_backend() == "gloo" and not dist.is_initialized()
    assert gc.isenabled()  # which it is not while a server of ranks loads what they need
    tensor = torch.ones(2)
    td.all_reduce(tensor)
    pair = td.new_group([0, 1])
    td.all_reduce(tensor, group=pair)
    assert tensor.tolist() == [4.0, 4.0]
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.full((1, 2), float(td.get_rank()))).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]] * 2
    from torchestra.interop.torch_distributed import inner_group
    inner_group(td.group.WORLD)

@pytest.mark.ranks(2, world="torch", backend="gloo")
def test_on_gloo_itself():
    tensor = torch.ones(2)
    td.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0] and td.get_backend() == "gloo"
    assert type(td.group.WORLD) is td.ProcessGroup

@pytest.mark.ranks(2, world="torch", backend="gloo")
def test_on_gloo_without_an_operation():
    # They have waited for each other: a rank that ends while others connect makes these fail.
    assert td.group.WORLD._get_sequence_number_for_group() > 0

@pytest.mark.ranks(2, world="torch", init=False)
@pytest.mark.parametrize("again", [1, 2])
def test_a_program_makes_its_group_itself(again):
    assert not td.is_initialized() and os.environ["LOCAL_RANK"] == os.environ["RANK"]
    td.init_process_group("gloo")
    td.barrier()
    assert td.get_world_size() == 2
    from torchestra.interop.torch_distributed import inner_group
    inner_group(td.group.WORLD)
    td.destroy_process_group()

@pytest.mark.ranks(2, world="torch", kind=("processes", "threads"), timeout=4)
def test_waits_for_a_rank_that_sleeps():
    if td.get_rank() == 1:
        release.wait(100)
    td.barrier()

release = threading.Event()

@both
def test_raises():
    if td.get_rank() == 1:
        raise KeyError("no such layer")
    td.barrier()

@both
def test_differs():
    td.all_reduce(torch.ones(2 + td.get_rank()))

@both
def test_returns_early():
    if td.get_rank() == 0:
        td.barrier()

@pytest.mark.ranks(2, world="torch")
def test_makes_a_second_default_group():
    td.init_process_group("gloo")

@pytest.mark.ranks(2, world="torch", timeout=100)
def test_exits():
    if td.get_rank() == 1:
        os._exit(7)
    td.barrier()

def test_afterwards_gloo_is_gloo():
    release.set()
    from torchestra.interop import switch
    assert not switch.is_on() and not td.is_initialized()
"""


def test_ranks_in_the_world_of_torch_distributed(pytester: pytest.Pytester) -> None:
    """One run for all: what it takes to load torch for it costs more than the tests."""
    result = run_apart(pytester, TORCH_WORLD, "-v", "-rf")
    result.assert_outcomes(passed=7, failed=10)
    text = result.stdout.str()
    for kind in ("processes", "threads"):
        _, _, hang = text.partition(f" test_waits_for_a_rank_that_sleeps[2-{kind}] _")
        hang = hang.partition("\n____")[0]
        assert f"on rank 0 of 2 {kind}" in hang
        assert re.search(r"timed out after [\d.]+ s on rank 0: rank 1 had not arrived", hang)
        assert ">       td.barrier()" in hang
        assert "in test_waits_for_a_rank_that_sleeps\n    release.wait(100)" in hang, "where rank 1 was"
        _, _, raised = text.partition(f" test_raises[2-{kind}] _")
        raised = raised.partition("\n____")[0]
        assert f"on rank 1 of 2 {kind}" in raised
        assert "KeyError: 'no such layer'" in raised
        _, _, differed = text.partition(f" test_differs[2-{kind}] _")
        assert "rank 1 called all_reduce(SUM, float32, 3 elements)" in differed
        assert "failed likewise" in differed.partition("\n____")[0]
        _, _, early = text.partition(f" test_returns_early[2-{kind}] _")
        assert "- Captured rank 1 of 2 call -" in early.partition("\n____")[0]
        assert "had ended the test" in early.partition("\n____")[0]
    assert "the process of rank 1 ended with exit code 7" in text
    assert "init=False) leaves that to it" in text
    assert "src/torchestra" not in text, "torchestra's own frames"
    assert "distributed_c10d.py" not in text, "torch's frames beneath the user's"


SLOW_REPORT = """
import os, time

class Slow:
    def __repr__(self):
        time.sleep(4)  # as formatting takes it on a busy machine
        return "<slow>"

@pytest.mark.ranks(2, kind="processes", timeout=4)
def test_it(request):
    if dist.get_rank() == 0:
        slow = Slow()
        dist.barrier()
    else:
        time.sleep(100)
"""


def test_a_report_is_not_lost_by_the_time_that_its_formatting_takes(pytester: pytest.Pytester) -> None:
    """Longer than what is left of the test's time, and than the others get when a rank has failed."""
    result = run_apart(pytester, SLOW_REPORT, "--showlocals")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*CollectiveTimeoutError*rank 1 had not arrived*", "*slow * = <slow>*"])


def test_what_ranks_print_and_log_bears_their_number(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import logging

@pytest.mark.ranks(2)
def test_logs(caplog):
    logging.getLogger("mine").warning("from %d", dist.get_rank())
    dist.barrier()
    assert sorted(caplog.messages) == ["from 0", "from 1"]
    assert False
""",
    )
    result.stdout.fnmatch_lines_random(["[[]rank 0[]] WARNING *from 0", "[[]rank 1[]] WARNING *from 1"])


def test_assertions_of_torchestra_itself_are_not_rewritten(pytester: pytest.Pytester) -> None:
    """pytest's loader, which parses every module anew, would be the modules' loader."""
    source = """
import sys

@pytest.mark.ranks(1)
def test_it():
    from torchestra.testing import rank_fixtures as rank_world
    assert type(rank_world.__loader__).__name__ == "SourceFileLoader"
    assert type(sys.modules[__name__].__loader__).__name__ == "AssertionRewritingHook"
"""
    pytester.makepyfile(HEAD + "pytest.register_assert_rewrite('torchestra')\n" + source)
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_threads_of_the_session_warn_of_nothing(pytester: pytest.Pytester) -> None:
    """Python 3.12 and later warn where a process that has threads forks; xdist's workers have some."""
    result = run_apart(
        pytester,
        """
import threading
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()

@pytest.mark.ranks(2, kind="processes")
def test_of_processes():
    dist.barrier()

def test_that_the_thread_was_there():
    assert thread.is_alive()
    done.set()
""",
    )
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*DeprecationWarning*")
