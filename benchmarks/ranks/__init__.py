"""The code that runs inside a measured rank.

This package is also started in environments that have mpi4py and NumPy but neither torch nor
torchestra (see ``__main__.py``), so it imports nothing of torchestra outside itself, and torch or
mpi4py only in the module that needs it.
"""
