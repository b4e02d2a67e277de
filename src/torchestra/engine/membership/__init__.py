"""Who is in a group: how ranks join, and how survivors agree on a new group."""
