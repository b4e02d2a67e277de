"""Entries: builtin functions that run operations on plain tensors, with no Python before the kernel."""
