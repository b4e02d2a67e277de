"""Started by a launcher: hands its environment on to a rank that waits for it (launched.py)."""

import os
import socket
import sys
import time

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

rank = next(os.environ[name] for name in RANKS if name in os.environ)
path = os.path.join(sys.argv[1], "relay-" + rank)
while not os.path.exists(path):
    if not os.path.exists(sys.argv[1]):
        sys.exit("the test is over")
    time.sleep(0.002)
descriptors = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
with socket.socket(socket.AF_UNIX) as door:
    door.connect(path)
    told = "\0".join(f"{name}={value}" for name, value in os.environ.items()).encode()
    socket.send_fds(door, [len(told).to_bytes(4, "little")], [0, *descriptors])
    door.sendall(told)
    ended = door.recv(1)
    if ended and descriptors:
        # A handler of exit() tells MPICH's proxy that a rank has ended well; a forked rank calls none.
        # When one ends that has not said so, the proxy kills all others on its host.
        with socket.socket(fileno=descriptors[0]) as proxy:
            proxy.sendall(b"cmd=finalize\n")
            proxy.recv(4096)
sys.exit(0 if ended else "the rank has failed")
