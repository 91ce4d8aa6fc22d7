"""Which pushes have arrived: none is lost unseen, none is applied twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_g2.errors import ProtocolError
from lightning_g2.values import PushPacket, PushReceipt


@dataclass
class Ledger:
    """The last push of each (rank, lane) and what was answered to it."""

    _last: dict[tuple[int, int], tuple[int, PushReceipt]] = field(default_factory=dict)

    def repeated(self, packet: PushPacket) -> PushReceipt | None:
        """The receipt already given to this very packet; None when it is the next one in its lane.

        Raises:
            ProtocolError: a push is missing before this one, or this one is older than the last.
        """
        last, receipt = self._last.get((packet.rank, packet.lane), (-1, None))
        if packet.sequence == last:
            return receipt
        if packet.sequence != last + 1:
            raise ProtocolError(
                f"push {packet.sequence} of rank {packet.rank}, lane {packet.lane}: "
                f"the server expects push {last + 1}; a push was lost or sent out of order"
            )
        return None

    def enter(self, packet: PushPacket, receipt: PushReceipt) -> None:
        """Remember the receipt of a packet that has been taken in."""
        self._last[packet.rank, packet.lane] = (packet.sequence, receipt)

    def amend(self, packet: PushPacket, receipt: PushReceipt) -> None:
        """Replace the receipt of a packet that was taken in earlier, if it still is the last of its lane."""
        sequence, _ = self._last.get((packet.rank, packet.lane), (-1, None))
        if sequence == packet.sequence:
            self.enter(packet, receipt)
