"""PyTorch's own distributed tests, renamed to torchestra.compat and run: ``python -m tools.conformance``."""
