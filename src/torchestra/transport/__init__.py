"""The transport between hosts: encrypted connections over ZeroMQ, to ranks that have proved the job's secret.

endpoint.py defines which peers are trusted, framing.py the form of messages, transport.py the connections,
and rendezvous.py how the ranks find each other. Remote calls and the collectives of groups on several hosts
use it.
"""
