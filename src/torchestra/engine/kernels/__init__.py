"""The compiled functions: each is one collective from beginning to end, resumable where it waits."""
