"""Where torchestra serves other libraries; the only place, bridges apart, that imports torch.distributed."""
