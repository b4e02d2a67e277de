"""The memory that the ranks of a group share: its layout, how it is mapped, how its descriptor is passed."""
