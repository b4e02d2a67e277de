"""The run of PyTorch's own tests after the rename: its rename, its isolation, and its report."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tools.conformance.renaming import renamed
from tools.conformance.reporting import general, reason, show
from tools.conformance.running import Ending, run_module

CASES = """
import os, time, unittest

class Case(unittest.TestCase):
    def test_a_passes(self):
        pass

    def test_b_ends_its_process(self):
        os._exit(3)

    def test_c_hangs(self):
        time.sleep(1000)

    @unittest.skip("no reason")
    def test_d_is_skipped(self):
        pass

    def test_e_fails(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(number, 0)

    def test_f_is_not_wanted(self):
        pass
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.distributed as dist", "import torchestra.compat as dist"),
        ("torch.distributed.rpc.api.x", "torchestra.compat.rpc.api.x"),
        ("import torch.distributions", "import torch.distributions"),
        (
            "from torch._C._distributed_c10d import Store",
            "from torchestra.compat.distributed_c10d import Store",
        ),
        (
            "from torch.testing._internal.common_distributed import MultiProcessTestCase",
            "from torchestra.compat.testing import MultiProcessTestCase",
        ),
        (
            "from torch.testing._internal.distributed.multi_threaded_pg import x",
            "from torchestra.compat.testing import x",
        ),
        (
            "from torch.testing._internal.distributed.rpc.rpc_test import x",
            "from renamed.distributed.rpc.rpc_test import x",
        ),
        ("from torch.testing._internal.common_utils import x",) * 2,
        ("nn.parallel.DistributedDataParallel(m)", "torchestra.nn.parallel.DistributedDataParallel(m)"),
        ("nn.parallel.DataParallel(m)",) * 2,
        ("import torch\ntorch.distributed.x", "import torch\nimport torchestra.compat\ntorchestra.compat.x"),
    ],
)
def test_only_names_are_changed(text: str, expected: str) -> None:
    assert renamed(text) == expected


def test_a_test_that_hangs_or_dies_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    told: list[Ending] = []
    endings = run_module(
        "module", "cases", tmp_path, {}, 8.0, lambda name: "not_wanted" not in name, told.append
    )
    assert told == endings
    assert [(ending.test, ending.how) for ending in endings] == [
        ("Case.test_a_passes", "passed"),
        ("Case.test_b_ends_its_process", "crashed"),
        ("Case.test_c_hangs", "timed out"),
        ("Case.test_d_is_skipped", "skipped"),
        ("Case.test_e_fails", "failed"),
    ]
    assert reason(endings[3]) == "no reason"
    assert reason(endings[4]) == "AssertionError: 1 != 0"


def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text("import nonsense_that_nobody_has")
    (ending,) = run_module("module", "cases", tmp_path, {}, 3.0, lambda name: True, lambda ending: None)
    assert ending.how == "not loaded"
    assert "nonsense_that_nobody_has" in reason(ending)


def test_the_report_counts_by_module_and_lists_by_reason() -> None:
    rank = "RankFailure: Process 1 failed\nTraceback\n  File x\nValueError: tensors[{}] at 0x7f12 is wrong\n"
    endings = [
        Ending("one", "A.test_1", "passed", "", 0.1),
        Ending("one", "A.test_2", "failed", rank.format(2), 0.1),
        Ending("two", "B.test_3", "failed", rank.format(3), 0.1),
        Ending("two", "B.test_4", "skipped", "small", 0.1),
    ]
    assert reason(endings[1]) == "ValueError: tensors[2] at 0x7f12 is wrong"
    assert (
        general(reason(endings[1])) == general(reason(endings[2])) == "ValueError: tensors[N] at 0x… is wrong"
    )
    output = io.StringIO()
    show(endings, Console(file=output, width=200), skips=True)
    lines = output.getvalue().splitlines()
    (total,) = [line for line in lines if line.startswith("│ all")]
    assert total.split() == ["│", "all", "│", "1", "│", "2", "│", "│", "│", "1", "│"]
    assert any(line.split()[:2] == ["2", "ValueError:"] for line in lines)
    assert any("A.test_2, B.test_3" in line for line in lines)
    assert any(line.split() == ["1", "small"] for line in lines)
