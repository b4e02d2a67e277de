"""What is asked of the operating system: forks, limits, memory files, and directories for caches."""
