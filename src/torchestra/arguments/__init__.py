"""The arguments of public functions: options, and checks against annotations."""
