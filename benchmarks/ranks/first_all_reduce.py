"""The script whose start-up is timed: join, all_reduce once, tell the driver when that was done.

It is run by a launcher. The driver says by the environment whose functions it uses, and listens on a
datagram socket.
"""

from __future__ import annotations

import importlib
import os
import socket
import time

import torch

if __name__ == "__main__":
    dist = importlib.import_module(os.environ["TORCHESTRA_BENCH_MODULE"])
    dist.init_process_group(os.environ.get("TORCHESTRA_BENCH_BACKEND"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    done = time.monotonic()
    assert tensor.item() == dist.get_world_size()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        mark.sendto(repr(done).encode(), "\0" + os.environ["TORCHESTRA_BENCH_SOCKET"])
    dist.destroy_process_group()
