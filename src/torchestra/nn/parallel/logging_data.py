"""Logging data of a DistributedDataParallel, in torch's fields.

Times are in nanoseconds, of sampled steps only: the first ten, then every hundredth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Union

import torch

from torchestra.nn.parallel.reducer import Reducer
from torchestra.process_group import ProcessGroup

_FIRST_STEPS = 10
_SAMPLE_RATE = 100
_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_OF_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
# The names of dtypes in C++, which torch's fields have.
_TYPE_NAMES = {torch.int64: "long int", torch.bool: "bool", torch.bfloat16: "c10::BFloat16"}
_TYPE_NAMES |= {torch.float16: "c10::Half", torch.float32: "float", torch.float64: "double"}
_TYPE_NAMES |= {torch.complex64: "c10::complex<float>", torch.complex128: "c10::complex<double>"}

LoggingValue = Union[str, int]


class Logger:
    """Collects logging data of a reducer, and the errors that its module has raised."""

    def __init__(self, reducer: Reducer, group: ProcessGroup) -> None:
        self._reducer = reducer
        self._fields: dict[str, LoggingValue] = {}
        self._sums: dict[str, int] = {}
        self._recorded = 0
        self.sample_rate = _SAMPLE_RATE
        # Converts values of perf_counter_ns() to times of day.
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self.set_group(group)
        variables = list(_ENVIRONMENT)
        if group.known_as == "gloo":
            variables += _OF_GLOO
            self.set("gloo_num_threads", group.options.threads)
        for name in variables:
            self.set(name.lower(), os.environ.get(name, "N/A"))

    def set_group(self, group: ProcessGroup) -> None:
        """Set the fields that describe the group."""
        self.set("world_size", group.size())
        self.set("rank", group.rank())
        self.set("backend_name", group.known_as)

    def set(self, name: str, value: LoggingValue) -> None:
        self._fields[name] = value

    def set_construction_data(self, parameters: Sequence[torch.Tensor], **fields: LoggingValue) -> None:
        """Set the fields that do not change any more: the given ones, and those of the parameters."""
        dtypes = sorted({_TYPE_NAMES.get(each.dtype, str(each.dtype)) for each in parameters})
        self._fields |= {
            name: int(value) if isinstance(value, bool) else value for name, value in fields.items()
        }
        self._fields |= {
            "is_multi_device_module": int(len({each.device for each in parameters}) > 1),
            "dtypes": ", ".join(dtypes),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
            "bucket_sizes": self._bucket_sizes(),
            "iteration": 0,
        }

    def set_error(self, error: str) -> None:
        """Record that an error was raised, and in which step."""
        self._fields |= {"has_error": 1, "error": error, "iteration": self._reducer.iterations}

    def before_forward(self) -> None:
        """Record the previous step, if it is sampled. Called before every forward pass to be reduced."""
        done = self._reducer.iterations
        self._reducer.tracker.record = self._samples(done + 1)
        if done and self._samples(done):
            self._take_step()

    def _samples(self, step: int) -> bool:
        return step <= _FIRST_STEPS or step % self.sample_rate == 0

    def data(self) -> dict[str, LoggingValue]:
        """Return all fields as they are now."""
        fields = dict(self._fields)
        fields["can_set_static_graph"] = int(self._reducer.graph_is_static)
        return fields

    def _bucket_sizes(self) -> str:
        return ", ".join(str(bucket.nbytes) for bucket in self._reducer.buckets)

    def _take_step(self) -> None:
        reducer, counters = self._reducer, self._reducer.counters
        parameters = reducer.parameters
        self._fields |= {
            "iteration": reducer.iterations,
            "num_buckets_reduced": counters.reduced,
            "unused_parameter_size": sum(parameters[index].nbytes for index in reducer.last_unused),
            "has_rebuilt_buckets": int(reducer.rebuilt is not None),
        }
        if order := reducer.tracker.order:
            self._fields["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))
        if reducer.rebuilt is not None:
            self._fields["rebuilt_bucket_sizes"] = self._bucket_sizes()
            self._fields["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, indices)) for indices in reducer.rebuilt
            )
        begun, ended = counters.backward_started, counters.backward_ended
        sent, received = counters.communication_started, counters.communication_ended
        if not received or received < counters.forward_started:
            return  # the forward pass was not followed by a backward
        stamps = {
            "forward_compute_time_start": counters.forward_started,
            "backward_compute_time_start": begun,
            "backward_compute_time_end": ended,
            "backward_comm_time_start": sent,
            "backward_comm_time_end": received,
        }
        times = {
            "forward_compute_time": begun - counters.forward_started,
            "backward_compute_time": ended - begun,
            "backward_comm_time": received - sent,
            "backward_compute_comm_overlap_time": max(0, ended - sent),
        }
        self._recorded += 1
        for name, value in times.items():
            self._sums[name] = self._sums.get(name, 0) + value
            self._fields[name] = value
            self._fields[f"avg_{name}"] = self._sums[name] // self._recorded
        for name, value in stamps.items():
            self._fields[name] = self._epoch + value
