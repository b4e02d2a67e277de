"""Other people's software, and programs for it that say nothing of torchestra: the same results as on Gloo.

Each runs twice as a user would run it, the second time with TORCHESTRA_FOR=gloo in the environment.
`make test-ecosystem` installs what each needs, into an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from software_times import Times

import torchestra
import worlds
from torchestra.interop import adopt

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_SECONDS = 600.0
SERVED = 'serves "gloo" here'
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
)

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS + 20)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a library is not installed, which is large and not needed for anything else."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: make test-ecosystem installs it",
    )


def output(served: bool, *command: str, **variables: str) -> str:
    """What a program prints, stderr last; whether torchestra served it is checked by what that logs."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(torchestra.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's workers give way to all other processes by default (niceness 15): on a busy machine they start
        # for longer than Ray waits.
        "RAY_worker_niceness": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    environment.pop("TORCHESTRA_FOR", None)
    if served:
        environment["TORCHESTRA_FOR"] = "gloo"
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_SECONDS,
        env=environment,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert (SERVED in said) is served, said
    return said


def result(said: str) -> dict[str, Any]:
    """What the program found: ranks, losses, seconds."""
    (line,) = [line for line in said.splitlines() if "RESULT {" in line]
    found: dict[str, Any] = json.loads(line.partition("RESULT ")[2])
    return found


def compare(name: str, times: Times, *command: str, longer: Sequence[str] = ()) -> None:
    """Run a program on Gloo and on torchestra, by turns; ``longer``: its arguments if it is measured."""
    arguments = (*command, *(longer if times.rounds > 1 else ()))
    for _ in range(times.rounds):
        on_gloo, ours = (result(output(served, *arguments)) for served in (False, True))
        assert ours["ranks"] == on_gloo["ranks"] == 2
        assert ours["losses"]
        assert ours["losses"] == pytest.approx(on_gloo["losses"], rel=1e-5, abs=2e-6)
        for served, found in ((False, on_gloo), (True, ours)):
            times.add(name, served, found["processor_seconds"], found["seconds"])


def processor_seconds() -> float:
    """Return the processor time of all processes that this one has started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@needs("transformers")
def test_transformers_trainer(times: Times, nothing_left: Callable[[], None]) -> None:
    program = str(PROGRAMS / "trainer.py")
    compare("transformers: Trainer, a tiny Llama", times, *TORCHRUN, program, longer=["10"])
    nothing_left()


@needs("accelerate")
def test_accelerates_own_test_script(times: Times, nothing_left: Callable[[], None]) -> None:
    """It checks by itself what it does: data loaders, gathering, training against one process.

    Its times are those of whole processes, which import libraries for most of them.
    """
    found = importlib.util.find_spec("accelerate.test_utils.scripts.test_script")
    assert found is not None
    assert found.origin is not None
    for served in (False, True) * times.rounds:
        began, began_processor = time.perf_counter(), processor_seconds()
        output(served, *TORCHRUN, found.origin, ACCELERATE_USE_CPU="true")
        used = processor_seconds() - began_processor
        times.add("accelerate: its test script, whole", served, used, time.perf_counter() - began)
    nothing_left()


@needs("lightning")
def test_lightning(times: Times, nothing_left: Callable[[], None]) -> None:
    compare('Lightning: strategy "ddp"', times, str(PROGRAMS / "lightning_fit.py"), longer=["30"])
    nothing_left()


@needs("torchmetrics")
def test_torchmetrics(times: Times, nothing_left: Callable[[], None]) -> None:
    compare("torchmetrics: six metrics", times, *TORCHRUN, str(PROGRAMS / "metrics.py"), longer=["200"])
    nothing_left()


def share(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of five classes and the labels that a rank sees; ranks see differently many."""
    generator = torch.Generator().manual_seed(rank)
    number = 20 + 7 * rank
    return torch.rand(number, 5, generator=generator), torch.randint(0, 5, (number,), generator=generator)


def synchronise_metrics() -> None:
    """Compare metrics of each rank's share, synchronised, with those of all shares."""
    from torchmetrics import CatMetric, MeanMetric, PearsonCorrCoef
    from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

    adopt()
    rank, size = torchestra.get_rank(), torchestra.get_world_size()
    everything = tuple(torch.cat(parts) for parts in zip(*map(share, range(size)), strict=True))
    values = []
    for synchronised, (scores, labels) in ((True, share(rank)), (False, everything)):
        options = {"sync_on_compute": synchronised}
        metrics = [
            (MulticlassAccuracy(5, **options), (scores, labels)),
            (MulticlassConfusionMatrix(5, **options), (scores, labels)),
            (BinaryAUROC(**options), (scores[:, 0], (labels == 0).long())),
            (PearsonCorrCoef(**options), (scores[:, 0], scores[:, 1])),
            (MeanMetric(**options), (scores,)),
            (CatMetric(**options), (scores[:, 2],)),
        ]
        for metric, given in metrics:
            metric.update(*given)
        values.append([metric.compute() for metric, _ in metrics])
    torch.testing.assert_close(*values)
    assert len(values[0][-1]) == sum(len(share(each)[1]) for each in range(size))


@needs("torchmetrics")
def test_torchmetrics_synchronises_in_a_program_of_torchestras_own(nothing_left: Callable[[], None]) -> None:
    """After ``adopt()`` its states are gathered: sums, lists of uneven lengths, moments."""
    worlds.run("processes", 2, synchronise_metrics, limit=LIMIT_SECONDS)  # importing it takes most of this
    nothing_left()


@needs("ray")
def test_ray_train(times: Times) -> None:
    compare("Ray Train: TorchTrainer", times, str(PROGRAMS / "ray_train.py"), longer=["60"])


@needs("vllm")
def test_vllm(times: Times, nothing_left: Callable[[], None]) -> None:
    """Tensor parallel inference: the same tokens by vLLM's shared memory, Gloo and torchestra."""
    program = str(PROGRAMS / "vllm_generate.py")
    variables = {
        "PYTHONPATH": f"{Path(torchestra.__file__).parents[1]}:{PROGRAMS}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    own = result(output(False, program, "own", **variables))
    on_gloo, ours = (result(output(served, program, **variables)) for served in (False, True))
    assert ours["tokens"] == on_gloo["tokens"] == own["tokens"]
    for name, first in (("vLLM: 256 tokens", on_gloo), ("the same, in place of Gloo vLLM's own", own)):
        for served, found in ((False, first), (True, ours)):
            times.add(name, served, math.nan, found["seconds"])
    nothing_left()


def slow_rank() -> torchestra.FlightRecord:
    torchestra.init_process_group()
    torchestra.barrier()
    for _ in range(20):
        if torchestra.get_rank() == 1:
            time.sleep(0.01)  # the subject, not a way to wait for somebody
        torchestra.all_reduce(torch.ones(1000))
    torchestra.barrier()
    return torchestra.flight_record()


@needs("hta")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:hta")  # of pandas, which goes on
def test_holistic_trace_analysis(tmp_path: Path) -> None:
    """It reads the profiles of a flight record, and sees who computes and who waits."""
    from hta.trace_analysis import TraceAnalysis

    torchestra.launch(slow_rank, 2)[0].save(tmp_path, "kineto")
    analysis = TraceAnalysis(trace_dir=str(tmp_path))
    kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
    assert set(kinds["kernel_type"]) == {"COMPUTATION", "COMMUNICATION"}
    assert "ncclKernel_all_reduce" in set(kernels["name"])
    busy = analysis.get_temporal_breakdown(visualize=False).set_index("rank")["compute_time_pctg"]
    assert busy[1] > 90 > 50 > busy[0]
