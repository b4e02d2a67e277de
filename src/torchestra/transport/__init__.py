"""The transport between hosts: encrypted connections over ZeroMQ, to ranks that have proved the job's secret.

cards.py tells who is trusted, framing.py what is said, connections.py who says it, and meeting.py how the
ends find each other. Remote calls and the collectives of groups on several hosts use it.
"""
