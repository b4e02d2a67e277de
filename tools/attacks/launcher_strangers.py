"""Strangers at the store that the launcher of a job listens with, while the job makes groups and reduces."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tools.attacks import Outcome
from tools.attacks._flood import SILENCE, Flood

SECONDS_TO_START, SECONDS_TO_END = 100.0, 100.0


def attack(seconds: float) -> Outcome:
    """Launch a job of two ranks, which works until it is told to end, and flood its port."""
    from torchestra.engine import warm_up
    from torchestra.launcher import launch

    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "go-on").touch()  # gone with the directory at the latest: a job that is late ends too
        ended: list[Any] = []

        def run() -> None:
            try:
                ended.append(launch(work, 2, name))
            except Exception as error:
                ended.append(error)

        warm_up()  # compiling may take longer than a job may take to start
        job = threading.Thread(target=run, daemon=True)
        job.start()
        deadline = time.monotonic() + SECONDS_TO_START
        while not (directory / "address").exists() and not ended and time.monotonic() < deadline:
            time.sleep(0.01)
        if (directory / "address").exists():
            host, port = (directory / "address").read_text().split(":")
            talks = [SILENCE, (b"GET / HTTP/1.1\r\n\r\n",), (os.urandom(200),)]
            with Flood((host, int(port)), talks) as flood:
                time.sleep(seconds)
                (directory / "go-on").unlink()
                job.join(SECONDS_TO_END)
            outcome.tried["strangers"] = flood.seen["opened"]
            outcome.refused["strangers"] = flood.seen["ended"]
    job.join(SECONDS_TO_END)
    counts = ended[0] if ended and isinstance(ended[0], list) else []
    outcome.tried["groups made by the job"] = counts[0] if counts else 0
    outcome.expect(bool(counts) and counts[0] > 0, f"the job has failed, or hangs: {ended}")
    return outcome


def work(directory: str) -> int:
    """On a rank: make groups and reduce in them; how many."""
    import torch

    import torchestra as dist

    dist.init_process_group()
    if dist.get_rank() == 0:
        part = Path(directory, "part")
        part.write_text(os.environ["TORCHESTRA_STORE"])
        part.rename(Path(directory, "address"))
    made, over = 0, torch.zeros(1)
    while not over.item():
        group = dist.new_group()
        over.fill_(float(dist.get_rank() == 0 and not Path(directory, "go-on").exists()))
        dist.all_reduce(over, group=group)
        dist.destroy_process_group(group)
        made += 1
    dist.destroy_process_group()
    return made
