"""torchestra for other libraries; the only package, bridges apart, that imports torch.distributed."""
