"""The callback that owns a rank's gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_g2.routing import Gate, GateContext, GateDecision
from lightning_g2.routing.registry import build_training_gate


class G2RoutingCallback(Callback):
    """Routes each push of this rank through a gate, on the device where the gradients lie.

    The strategy adds one by itself; give your own to choose the gate or its options::

        Trainer(strategy="g2async", callbacks=[G2RoutingCallback("g2_spectral", beta=8.0)])

    Args:
        gate: name of the gate, see :func:`lightning_g2.routing.available_gates`; ``"none"`` turns routing off.
        **options: options of the gate.

    Raises:
        ConfigurationError: unknown gate or option, a value out of range, or a rule that only a simulation can run.
    """

    def __init__(self, gate: str = "g2_spectral", **options: Any) -> None:
        self.name = gate
        self.options = options
        self.gate: Gate = build_training_gate(gate, **options)
        self._friction: dict[str, tuple[float, int]] = {}  # by block, sum and number

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A new fit starts with a gate that knows nothing of the last one."""
        if stage == "fit":
            self.gate = build_training_gate(self.name, **self.options)

    def route(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Decide on one push.

        Args:
            gradients: the rank's clipped gradients by parameter name, each of its parameter's shape.
            context: what is known at the decision.
        """
        decision = self.gate.decide(gradients, context)
        for block, energy in decision.block_energy.items():
            total, count = self._friction.get(block, (0.0, 0))
            self._friction[block] = total + energy, count + 1
        return decision

    def drain_friction(self) -> dict[str, float]:
        """Mean friction of each filtered block over this rank's pushes since the last call."""
        means = {block: total / count for block, (total, count) in self._friction.items()}
        self._friction.clear()
        return means
