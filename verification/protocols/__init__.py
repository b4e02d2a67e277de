"""Search the protocols that are Python over shared words, a store, or locks, in the product's own source.

A rank's code is run anew after each of its operations, with the results of all operations before: so its
state between two operations is data (:mod:`verification.protocols.replay`), as it is for kernels.
"""
