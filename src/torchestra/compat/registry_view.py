"""A read-only view of this rank's groups in the form of torch's registry, ``_world``."""

from __future__ import annotations

from typing import Any

from torchestra.compat.backends import get_backend_config
from torchestra.process_group import ProcessGroup
from torchestra.store import Store
from torchestra.world.backend_info import get_pg_count
from torchestra.world.registry import current_world

__all__ = ["_World", "_world"]


class _World:
    """The groups of the calling thread's rank; each table is computed when it is read."""

    @property
    def default_pg(self) -> ProcessGroup | None:
        """The default group."""
        return current_world().default

    @property
    def pg_map(self) -> dict[ProcessGroup, tuple[str, Store]]:
        """Each group's backend, and the store that it was made over."""
        return {group: (group.known_as, group.get_group_store()) for group in self._groups()}

    @property
    def pg_names(self) -> dict[ProcessGroup, str]:
        """Each group's name."""
        return {group: group.group_name for group in self._groups()}

    @property
    def pg_group_ranks(self) -> dict[ProcessGroup, dict[int, int]]:
        """The numbers in each group, by global rank."""
        return {group: {rank: number for number, rank in enumerate(group.ranks)} for group in self._groups()}

    @property
    def pg_backend_config(self) -> dict[ProcessGroup, str]:
        """Each group's backends by device."""
        return {group: get_backend_config(group) for group in self._groups()}

    @property
    def group_count(self) -> int:
        """The number of groups that all ranks have made together."""
        return get_pg_count()

    @property
    def pg_to_tag(self) -> dict[ProcessGroup, str]:
        """Each group's tag, see ``_get_group_tag``."""
        return {group: current_world().tag_of(group) for group in self._groups()}

    @property
    def tags_to_pg(self) -> dict[str, list[ProcessGroup]]:
        """The groups of each tag."""
        found: dict[str, list[ProcessGroup]] = {}
        for group, tag in self.pg_to_tag.items():
            found.setdefault(tag, []).append(group)
        return found

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """Each group's name, description, backends, size and ranks."""
        return [
            {
                "pg_name": group.group_name,
                "pg_desc": group.group_desc,
                "backend_config": get_backend_config(group),
                "ranks": list(group.ranks),
                "group_size": group.size(),
                "group_count": self.group_count,
            }
            for group in self._groups()
        ]

    @staticmethod
    def _groups() -> list[ProcessGroup]:
        return list(current_world().groups.values())


_world = _World()
