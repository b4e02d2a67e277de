"""Machine code: atomic accesses, compilation, and the cache of compiled kernels."""
