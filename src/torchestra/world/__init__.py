"""The groups of this process: the default group, further groups, and information on them."""
