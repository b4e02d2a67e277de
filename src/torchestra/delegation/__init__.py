"""Whole operations on tensors of a device, handed to what torch has for it: ProcessGroupNCCL for CUDA.

agreement.py decides whether a group does so, nccl.py makes torch's object, torchs_store.py is the store that
its ends meet in, engine.py has the operations, lane.py what comes before and after them on the device, and
watch.py looks after those that are under way.
"""
