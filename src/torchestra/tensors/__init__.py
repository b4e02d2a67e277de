"""Tensors on their way to the engine: checks, contiguity, sparse ones, those of GPUs, objects as bytes."""
