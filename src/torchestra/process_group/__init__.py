"""A group of ranks: its members, its name, and every operation on tensors as a method."""

from torchestra.arguments.options import GroupOptions
from torchestra.process_group.group import ProcessGroup
from torchestra.process_group.non_member import NonMember
from torchestra.process_group.round_robin import RoundRobinGroup

__all__ = ["GroupOptions", "NonMember", "ProcessGroup", "RoundRobinGroup"]
