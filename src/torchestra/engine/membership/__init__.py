"""Membership of a group: ranks join, and survivors agree on a new group."""
