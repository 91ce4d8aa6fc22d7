"""The versions of several servers in one number."""

from __future__ import annotations

from collections.abc import Sequence


class Versions(int):
    """Server 0's version, which is the job's, and those that the other servers had in the same weights.

    Ranks hand back what they were given: so each server learns the version of its own weights that a gradient was
    computed from. A plain number stands for all servers alike.
    """

    of_servers: tuple[int, ...]

    @classmethod
    def of(cls, versions: Sequence[int]) -> Versions:
        """The versions of all servers, server 0 first."""
        made = cls(versions[0])
        made.of_servers = tuple(versions)
        return made

    @staticmethod
    def at(version: int, server: int) -> int:
        """The version of one server."""
        return version.of_servers[server] if isinstance(version, Versions) else version
