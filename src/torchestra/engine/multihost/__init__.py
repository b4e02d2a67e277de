"""Groups whose ranks are on several hosts: the arena within each host, a bridge between them.

See docs/guides/several-hosts.md.
"""
