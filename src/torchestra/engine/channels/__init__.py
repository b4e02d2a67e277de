"""Messages between two ranks of a group, over memory that all its ranks share: send, recv, isend, irecv.

words.py tells where everything lies, ring.py how bytes get across and how ranks wait, matching.py which
message goes to which receive, working.py the kernels; mailbox.py (calls) and traffic.py (the thread) are the
Python over them.

An arena's channels can be used by a post office instead (posting.py, post_office.py): for whole messages of
any length that nobody has announced a receive for, sent and received by many threads.
"""

from __future__ import annotations

from torchestra.engine.channels.mailbox import Mailbox
from torchestra.engine.channels.post_office import LostPeerError, PostOffice
from torchestra.engine.channels.posting import warm_up_posting
from torchestra.engine.channels.transfer import Transfer, Waiter
from torchestra.engine.channels.words import channel_area_bytes
from torchestra.engine.channels.working import warm_up_channels
from torchestra.transport.message import Message

__all__ = [
    "LostPeerError",
    "Mailbox",
    "Message",
    "PostOffice",
    "Transfer",
    "Waiter",
    "channel_area_bytes",
    "warm_up_channels",
    "warm_up_posting",
]
