"""Whole operations on tensors of a device, handed to torch's backend for it: ProcessGroupNCCL for CUDA.

agreement.py decides whether a group does so, nccl.py makes torch's object, torch_store.py is the store in
which its ends meet, engine.py has the operations, stream_scheduler.py orders the device's streams around
them, and completion.py watches those that are under way.
"""
