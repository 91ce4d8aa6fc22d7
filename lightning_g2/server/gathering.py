"""Collectives through the server: what each member brings is handed to all, and one that dies holds nobody up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from lightning_g2.errors import ProtocolError

T = TypeVar("T")


class Gathering(Generic[T]):
    """Members that meet, and what they have brought so far to the collective under way.

    It ends when every member that has not left has brought something, with the same outcome for all of them: so there
    is no collective that one rank has been through and another has to repeat.

    Args:
        members: the ranks that take part.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self._members = set(members)
        self._kind = ""
        self._brought: dict[int, T] = {}

    @property
    def members(self) -> frozenset[int]:
        """The ranks that take part."""
        return frozenset(self._members)

    def bring(self, rank: int, kind: str, value: T) -> dict[int, T] | None:
        """A member brings its share.

        Args:
            rank: the member.
            kind: what collective it is; all members have to mean the same.
            value: its share.

        Returns:
            All shares by rank, where this was the last one that was missing; None otherwise.

        Raises:
            ProtocolError: members are in different collectives, or this rank is no member.
        """
        if rank not in self._members:
            raise ProtocolError(f"collective {kind!r}: rank {rank} does not meet ranks {sorted(self._members)}")
        if self._brought and kind != self._kind:
            others = ", ".join(map(str, sorted(self._brought)))
            raise ProtocolError(
                f"collective {kind!r} of rank {rank}: rank {others} is in collective {self._kind!r}; all ranks must "
                "call the same collectives in the same order"
            )
        self._kind = kind
        self._brought[rank] = value
        return self._ended()

    def leave(self, rank: int) -> dict[int, T] | None:
        """A member takes no further part, and its share with it; returns what :meth:`bring` does."""
        self._members.discard(rank)
        self._brought.pop(rank, None)
        return self._ended()

    def _ended(self) -> dict[int, T] | None:
        if not self._brought or self._brought.keys() != self._members:
            return None
        brought, self._brought = self._brought, {}
        return dict(sorted(brought.items()))
