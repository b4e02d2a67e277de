"""The arguments of public functions: options, and what annotations do not allow is refused."""
