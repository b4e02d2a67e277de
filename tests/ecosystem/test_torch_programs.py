"""What torch's own parts of torch.distributed give on Gloo, they give where torchestra serves "gloo"."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch_programs as programs
from torch_worlds import run

ON_TWO = (
    programs.fsdp1,
    programs.fsdp1_sharding_gradients_only,
    programs.fsdp2,
    programs.pipeline_gpipe,
    programs.pipeline_1f1b,
    programs.pipeline_interleaved,
    programs.objects_and_uneven_batches,
)
ON_FOUR = (
    programs.fsdp1_hybrid,
    programs.hsdp,
    programs.redistribution,
    programs.meshes_and_functional_collectives,
    programs.checkpoint_and_reshard,
    programs.pipeline_interleaved,
)
LIMIT_SECONDS = 100.0  # two worlds, and what each rank imports of torch


@pytest.mark.timeout(3 * LIMIT_SECONDS)
@pytest.mark.parametrize(
    ("program", "size"),
    [*((program, 2) for program in ON_TWO), *((program, 4) for program in ON_FOUR)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_outcome_is_that_of_gloo(program: Callable[[], list[float]], size: int) -> None:
    served, on_gloo = (
        run(size, program, backend="gloo", timeout=LIMIT_SECONDS, switched=switched)
        for switched in (True, False)
    )
    for rank in range(size):
        assert served[rank]
        assert served[rank] == pytest.approx(on_gloo[rank], rel=1e-5, abs=1e-6), f"rank {rank}"
