"""Start ranks on this host: ``torchestra run`` and :func:`launch`.

::

    launcher  ── socket ──  fork server  ── fork ──  rank 0, rank 1, …
    job.py                  fork_server.py           rank_process.py
        └──────── control channel and output pipes ──────┘

The launcher (``command.py`` for the command line, ``api.py`` for Python) needs no torch; the server
has loaded it once for all ranks. ``spec.py`` lists every message between the three.
"""

from torchestra.launcher.api import RemoteTraceback, launch
from torchestra.launcher.on_ray.options import RayOptions

__all__ = ["RayOptions", "RemoteTraceback", "launch"]
