"""Check the kernels' own source in every order of events that a weak memory allows: `make prove`.

Not part of the wheel. :mod:`verification.program` cuts kernels into steps, :mod:`verification.memory` is
the memory they share, :mod:`verification.world` has the possible events, :mod:`verification.search` explores
them; :mod:`verification.cases` has the models, and :mod:`verification.mutations` the ways to break the
kernels by which the checker itself is checked.
"""
