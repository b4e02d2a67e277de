"""torch's own stores, as ours."""

from __future__ import annotations

import sys

from warm_programs import FinalizedWarm, run_warm

PROGRAM = """
import atexit, threading
from datetime import timedelta
from torch.distributed import TCPStore
from torchestra.store import PrefixStore
from torchestra.store.torch_agent import TorchStore

inner = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
store = PrefixStore("some", TorchStore(inner))
begun = threading.Semaphore(0)

def ask():
    store.check(["key"])
    begun.release()
    while True:
        store.clone().check(["key"])

def say():
    store.set("word", b"told")
    print(store.get("word").decode(), flush=True)

atexit.register(say)
for _ in range(2):
    threading.Thread(target=ask, daemon=True).start()
    begun.acquire()
"""


def test_threads_that_still_ask_do_not_take_the_process_down_at_its_end() -> None:
    """As programs do for a moment, whose ranks torchrun has started. What is said at exit is."""
    command = [sys.executable, "-c", PROGRAM]
    done = run_warm(command, capture_output=True, text=True, timeout=100, kind=FinalizedWarm)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr
