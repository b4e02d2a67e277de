"""Tests that run once for each kind of device: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import os

import pytest
import torch

# Asked so, torch does not start CUDA, which ranks that are forked from this process could not use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def kind_for(device: str) -> str:
    """Return what kind of ranks to train on a device with.

    Autograd has one thread for each GPU, in which two ranks of a process would wait for each other.
    """
    return "threads" if device == "cpu" else "processes"


def gpus(number: int) -> pytest.MarkDecorator:
    """For a test that needs so many GPUs."""
    return pytest.mark.skipif(torch.cuda.device_count() < number, reason=f"no {number} CUDA devices")
