"""Which pushes have arrived, and what of an epoch they have brought: none is lost unseen, none is applied twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from lightning_g2.errors import ProtocolError
from lightning_g2.values import EpochPlan, EpochRecord, Fate, PushPacket, PushReceipt

FATES: tuple[Fate, ...] = get_args(Fate)
"""From the worst to the best."""


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


def fate_of(packet: PushPacket, receipt: PushReceipt) -> Fate:
    """What has become of the batches behind a push; one in a buffer is as good as applied."""
    if packet.rejected:
        return "rejected"
    if receipt.late:
        return "late"
    return "damped" if packet.weight < 1.0 else "applied"


class EpochLedger:
    """The proof of what was trained on in one epoch.

    Args:
        plan: the epoch.
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._times = bytearray(plan.batches or 0) if plan.shared else bytearray()  # by number; 255 stands for more
        self._partly: set[int] = set()  # some of a lost push of theirs has been applied
        self._fates: Counter[Fate] = Counter()
        self._samples: Counter[Fate] = Counter()
        self._returned: dict[int, list[int]] = {}
        self._ranks: Counter[int] = Counter()

    def pushed(self, fate: Fate, samples: int) -> None:
        """A push has been taken in.

        Args:
            fate: what has become of it.
            samples: training samples behind it.
        """
        self._samples[fate] += samples

    def enter(self, rank: int, numbers: Sequence[int], fate: Fate) -> None:
        """Batches have been trained on.

        Args:
            rank: who has.
            numbers: their numbers.
            fate: what has become of them.
        """
        if not numbers:
            return
        self._fates[fate] += len(numbers)
        self._ranks[rank] += len(numbers)
        for number in numbers:
            again = 2 if number in self._partly else 1
            self._partly.discard(number)
            self._times[number] = min(self._times[number] + again, 255)

    def give_back(self, rank: int, numbers: Sequence[int], *, partly: bool) -> None:
        """A rank has left behind what it had not trained on, or not to the end.

        Args:
            rank: who has.
            numbers: of the batches.
            partly: part of what it had to push for them has been applied.
        """
        self._returned.setdefault(rank, []).extend(numbers)
        if partly:
            self._partly.update(numbers)

    def record(self) -> EpochRecord:
        """What has been trained on so far."""
        plan = self._plan
        known = {*plan.cursor.loose, *range(plan.cursor.next, len(self._times))}
        return EpochRecord(
            epoch=plan.epoch,
            batches=plan.batches,
            before=plan.cursor.trained,
            fates=dict(self._fates),
            samples=dict(self._samples),
            once=self._times.count(1),
            again=tuple(number for number, times in enumerate(self._times) if times > 1),
            missing=tuple(number for number in sorted(known) if self._times[number] == 0),
            returned={rank: tuple(numbers) for rank, numbers in self._returned.items()},
            ranks=dict(self._ranks),
        )
