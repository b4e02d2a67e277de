"""The transport between hosts: encrypted connections over ZeroMQ, to ranks that have proved the job's secret.

endpoint.py tells who is trusted, framing.py what is said, transport.py who says it, and rendezvous.py how the
ends find each other. Remote calls and the collectives of groups on several hosts use it.
"""
