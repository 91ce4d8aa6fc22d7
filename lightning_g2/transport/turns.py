"""Packets of one rank in their order, whichever thread of a server has each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_g2.values import PushPacket

_PATIENCE_S = 20.0
"""How long a packet waits for the one before it; then the ledger says which is missing."""


class Turns:
    """Lets packets of a (rank, lane) through by their sequence numbers.

    A server's threads take messages from a connection in order, and may yet overtake each other on their way to the
    state.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next: dict[tuple[int, int], int] = {}

    @contextmanager
    def turn(self, packet: PushPacket) -> Iterator[None]:
        """Wait until every earlier packet of its (rank, lane) has been dealt with."""
        key = packet.rank, packet.lane
        with self._condition:
            self._condition.wait_for(lambda: packet.sequence <= self._next.get(key, 0), _PATIENCE_S)
        try:
            yield
        finally:
            with self._condition:  # after a failure, too: the next one is then refused at once
                self._next[key] = max(self._next.get(key, 0), packet.sequence + 1)
                self._condition.notify_all()
