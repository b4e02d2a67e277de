"""Whole operations on tensors of a device, handed to what torch has for it: ProcessGroupNCCL for CUDA.

agreement.py decides whether a group does so, nccl.py makes torch's object, torch_store.py is the store that
its ends meet in, engine.py has the operations, stream_scheduler.py what comes before and after them on the
device, and completion.py looks after those that are under way.
"""
