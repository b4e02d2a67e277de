"""Tags of messages that torchestra sends for itself: below 0, where none is a program's."""

ARRIVED = -(1 << 60)
"""A rank has come to a monitored barrier."""

PASSED = ARRIVED + 1
"""Rank 0's reply."""
