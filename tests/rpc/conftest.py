from __future__ import annotations

import pytest

import rpc_workers


@pytest.fixture(params=rpc_workers.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return whether workers are threads or processes."""
    return str(request.param)
