"""Failures: deadlines, the liveness of peers, and what an abort says."""
