"""Tests of distributed code: ranks as threads or processes, skips, faults, and a pytest plugin.

``@pytest.mark.ranks(4)`` runs a plain test function on four ranks (the plugin; installing torchestra is
enough). For unittest there are :class:`MultiThreadedTestCase`, :class:`MultiProcessTestCase` and
:func:`spawn_threads_and_init_comms`, which behave as their namesakes among PyTorch's own test helpers.
:mod:`~torchestra.testing.faults` kills, delays and loses ranks at chosen moments, and :func:`shuffle` runs
thread ranks in an order that a seed decides.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
