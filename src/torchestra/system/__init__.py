"""Services of the system: forks, limits, /proc, memory files, deadlines, proofs, caches, imports."""
