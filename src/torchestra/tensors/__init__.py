"""Preparing tensors for the engine: checks, contiguity, sparse tensors, and Python objects as bytes."""
