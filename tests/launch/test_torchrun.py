"""torchrun starts all ranks again when one fails (``--max-restarts``), and they meet anew."""

from __future__ import annotations

import sys
from pathlib import Path

from warm_programs import NestedWarm, run_warm

PROGRAM = """
import os
import torch
import torchestra as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group()
total = torch.tensor([dist.get_rank() + 1 + 10 * attempt])
dist.all_reduce(total)
if attempt == 0 and dist.get_rank() == 1:
    os._exit(3)
dist.barrier()
print(f"attempt {attempt}: {total.item()}", flush=True)
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_starts_again_meet(tmp_path: Path, nothing_left) -> None:
    """Not those of the first attempt, which have left a rank's keys in the agent's store."""
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_warm(
        [*command, "--max-restarts", "1", "--monitor-interval", "0.1", str(script)],
        capture_output=True,
        text=True,
        timeout=110,
        kind=NestedWarm,
    )
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe, so their lines may run into each other.
    assert done.stdout.replace("\n", "") == "attempt 1: 23" * 2
    nothing_left()
