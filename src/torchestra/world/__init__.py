"""The groups of this process: the default group, groups beside it, and what is known of them."""
