"""Messages between two ranks of a group, over memory that all its ranks share: send, recv, isend, irecv.

layout.py tells where everything lies, ring.py how bytes get across and how ranks wait, matching.py which
message goes to which receive, kernels.py the kernels, immediate.py those of messages that need not wait;
mailbox.py (calls) and progress.py (the thread) are the Python over them.

An arena's channels can be used by an endpoint instead (endpoint_kernels.py, endpoint.py): for whole messages
of any length that nobody has announced a receive for, sent and received by many threads.
"""
