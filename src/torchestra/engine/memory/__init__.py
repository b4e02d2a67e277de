"""The memory that the ranks of a group share: its layout, mapping, and the passing of its descriptor."""
