"""Messages between two ranks of a group, over memory that all its ranks share: send, recv, isend, irecv.

words.py tells where everything lies, ring.py how bytes get across and how ranks wait, matching.py which
message goes to which receive; mailbox.py (calls) and traffic.py (the thread) are the Python over them.
"""

from __future__ import annotations

from torchestra.engine.channels.mailbox import Mailbox
from torchestra.engine.channels.matching import warm_up_channels
from torchestra.engine.channels.transfer import Transfer, Waiter
from torchestra.engine.channels.words import channel_area_bytes

__all__ = ["Mailbox", "Transfer", "Waiter", "channel_area_bytes", "warm_up_channels"]
