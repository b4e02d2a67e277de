"""Services of the system: forks, limits, memory files, deadlines, proofs of the secret, caches, imports."""
