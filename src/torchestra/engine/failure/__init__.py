"""Failures: deadlines, the liveness of peers, and the texts of aborts."""
