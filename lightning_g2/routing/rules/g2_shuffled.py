"""Control of the g2 gate: each push is judged by the energy of another one."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from lightning_g2.routing.gate import GateContext
from lightning_g2.routing.reading import BlockReading
from lightning_g2.routing.rules.g2 import G2Gate
from lightning_g2.routing.sketch import block_seed

_REMEMBERED = 64


class ShuffledGate(G2Gate):
    """The g2 gate with each block's energy exchanged for that of one of the rank's last 64 pushes, drawn at random.

    Energies keep their distribution and lose their push: what the g2 gate wins over this control it owes to the energy
    of the very push that it judges. A block's first push keeps its own. Where it runs and what it needs: as
    :class:`G2Gate`; memory: 64 numbers a block more.

    Source:
        This package.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._random_draw = Random(block_seed(self.seed, "shuffled"))
        self._energies: dict[str, deque[float]] = {}

    def _reading(self, name: str, norm: float, energy: float, context: GateContext) -> BlockReading:
        reading = super()._reading(name, norm, energy, context)
        past = self._energies.setdefault(name, deque(maxlen=_REMEMBERED))
        own, reading.energy = reading.energy, self._random_draw.choice(past) if past else reading.energy
        past.append(own)
        return reading

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"{super().describe()} with energies shuffled"
