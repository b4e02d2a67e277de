"""Ranks on a Ray cluster: ``launch(fn, 8, on="ray")`` and ``torchestra run --on ray``.

::

    launcher      ── calls of Ray ──  actor of rank r  ── socket ──  fork server  ── fork ──  rank r
    backend.py                        actor.py                       as on one host

A placement group holds one bundle of resources per rank, and each bundle an actor (``placement.py``). The
rank itself is a child of its actor's own fork server: so its exit code, signals, output and last messages are
the same as on one host, whatever ends it, and when the actor ends, so does the rank. The launcher fetches
the actor's events (``messages.py``), call by call.

Ray is an optional dependency, imported only when a caller asks for it.
"""

from torchestra.launcher.on_ray.options import RayOptions

__all__ = ["RayOptions"]
