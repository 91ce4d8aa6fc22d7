"""Control of the g2 gate: energy decides, age does not."""

from __future__ import annotations

from lightning_g2.routing.gate import GateContext
from lightning_g2.routing.mge import local_weight
from lightning_g2.routing.rules.g2 import G2Gate


class EnergyOnlyGate(G2Gate):
    """The g2 gate with w = exp(-βE) for every stale push, whatever its age; a fresh one still passes whole.

    The opposite control, age without energy, is ``G2Gate(weight_rule="age")``. ``weight_rule`` has no effect. Where it
    runs, what it needs and its memory: as :class:`G2Gate`.

    Source:
        This package.
    """

    def _weight(self, energy: float, context: GateContext) -> float:
        return 1.0 if context.staleness == 0 else local_weight(energy, self.beta)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"{super().describe()} by energy only"
