"""Test what a wrapper tells about itself, in torch's fields."""

from __future__ import annotations

import pytest
import torch
from ddp_models import batch, loss, mlp
from torch import nn

import torchestra as dist
from torchestra.nn import SyncBatchNorm
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run

TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def step(wrapped: DistributedDataParallel) -> None:
    loss(wrapped(batch(1))).backward()


def test_what_is_known_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def body() -> dict[str, object]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).double())
        return DistributedDataParallel(
            model, bucket_cap_mb=1.5, find_unused_parameters=True, gradient_as_bucket_view=True
        )._get_ddp_logging_data()

    for rank, data in enumerate(run("threads", 2, body)):
        expected = {
            "world_size": 2,
            "rank": rank,
            "backend_name": "threads",
            "module_name": "Sequential",
            "device_ids": "",
            "output_device": -1,
            "broadcast_buffers": 1,
            "bucket_cap_bytes": 3 << 19,
            "find_unused_parameters": 1,
            "gradient_as_bucket_view": 1,
            "dtypes": "double, float",
            "num_parameter_tensors": 4,
            "total_parameter_size_bytes": 42 * 12,
            "bucket_sizes": "336, 168",
            "has_sync_bn": 0,
            "is_multi_device_module": 0,
            "iteration": 0,
            "master_port": "29500",
            "cuda_visible_devices": "N/A",
        }
        assert {name: data.get(name) for name in expected} == expected
        assert not {"comm_hook", "has_error", "static_graph", "has_rebuilt_buckets"} & data.keys()


def test_what_is_learned_in_steps_is_sampled() -> None:
    """The first ten steps, then one in two; a step is taken by the next forward."""

    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped._set_ddp_runtime_logging_sample_rate(2)
        for index in range(16):
            step(wrapped)
            data = wrapped._get_ddp_logging_data()
            if index and (index <= 10 or index % 2 == 0):
                assert data["iteration"] == index
                assert data["backward_compute_time"] >= data["backward_compute_comm_overlap_time"] >= 0
                assert data["backward_comm_time"] >= data["backward_compute_comm_overlap_time"]
                assert all(data[f"avg_{name}"] >= 0 for name in TIMES)
                assert all(data[name] > 0 for name in TIMES[:3])
            elif index:
                assert data["iteration"] == index - 1
        stamps = [
            data[name]
            for name in (
                "forward_compute_time_start",
                "backward_compute_time_start",
                "backward_comm_time_start",
                "backward_comm_time_end",
            )
        ]
        assert stamps == sorted(stamps)
        assert data["backward_compute_time_start"] <= data["backward_compute_time_end"]
        assert data["num_buckets_reduced"] == 1
        assert data["unused_parameter_size"] == 0
        assert data["has_rebuilt_buckets"] == 1
        size = sum(each.nbytes for each in wrapped.parameters())
        assert data["rebuilt_bucket_sizes"] == data["bucket_sizes"] == str(size)
        order = data["prev_iteration_grad_ready_order_indices"].split(", ")
        assert sorted(order) == sorted(map(str, range(6)))
        assert data["rebuilt_per_bucket_param_indices"] == " ".join(order)

    run("threads", 2, body)


def test_a_sample_rate_below_one_is_refused_and_logged() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        message = "DDP runtime logging sample rate should be equal or greater than 1"
        with pytest.raises(ValueError, match=message):
            wrapped._set_ddp_runtime_logging_sample_rate(0)
        data = wrapped._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert message in data["error"]

    run("threads", 1, body)


def test_a_static_graph_and_synchronised_batch_norms_are_told() -> None:
    def body() -> None:
        model = nn.Sequential(SyncBatchNorm(6), nn.Linear(6, 6))
        data = DistributedDataParallel(model, static_graph=True)._get_ddp_logging_data()
        assert data["has_sync_bn"] == 1
        assert data["static_graph"] == 1

    run("threads", 1, body)


def test_a_forward_without_backward_has_no_times() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        for _ in range(2):
            wrapped(batch(1))
        data = wrapped._get_ddp_logging_data()
        assert data["iteration"] == 1
        assert not set(TIMES) & data.keys()
        step(wrapped)
        assert dist.get_world_size() == 1
        assert torch.is_grad_enabled()

    run("threads", 1, body)
