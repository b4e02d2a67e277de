"""The road between hosts: encrypted connections over ZeroMQ, to workers that have proved the job's secret.

cards.py tells who is trusted, framing.py what is said, connections.py who says it.
"""

from torchestra.rpc.wire.connections import Wire
from torchestra.rpc.wire.meeting import connect

__all__ = ["Wire", "connect"]
