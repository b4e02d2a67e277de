"""Training on ranks that die and join: shards that any ranks sum alike, and the state to hand on."""

from torchestra.elastic.checkpoints import Checkpoint, Checkpoints
from torchestra.elastic.loop import shards
from torchestra.elastic.membership import MembershipChange
from torchestra.elastic.shard import Shard
from torchestra.elastic.state import State, Synced

__all__ = ["Checkpoint", "Checkpoints", "MembershipChange", "Shard", "State", "Synced", "shards"]
