"""Pushes that arrive in several packets: what is known of one before its last packet has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_g2.values import PushPacket


@dataclass
class OpenPush:
    """One push of which packets have come.

    Attributes:
        applied: some of its gradients have been applied.
        bytes_sent: bytes of its gradients so far.
        whole_bytes: bytes that they would be without rejection and compression.
    """

    applied: bool = False
    bytes_sent: int = 0
    whole_bytes: int = 0

    @property
    def bytes_saved(self) -> int:
        """Bytes that rejection and compression have saved."""
        return max(0, self.whole_bytes - self.bytes_sent)


@dataclass
class OpenPushes:
    """The pushes under way, one at most for each (rank, lane)."""

    _open: dict[tuple[int, int], OpenPush] = field(default_factory=dict)

    def take(self, packet: PushPacket) -> OpenPush:
        """The push that a packet belongs to, with its bytes counted; forgotten here once the packet is its last."""
        key = packet.rank, packet.lane
        push = self._open.setdefault(key, OpenPush())
        push.bytes_sent += packet.sent_bytes
        push.whole_bytes += packet.whole_bytes
        if packet.last:
            del self._open[key]
        return push

    def drop(self, rank: int) -> bool:
        """Forget what a rank has left unfinished; returns whether some of it has been applied."""
        left = [self._open.pop(key) for key in list(self._open) if key[0] == rank]
        return any(push.applied for push in left)
