"""Momentum kept by each rank, and looked ahead along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_g2.routing.gate import Gate, GateContext, is_filterable, rejection, unsound
from lightning_g2.routing.option import require
from lightning_g2.values import GateDecision


class DanaGate(Gate):
    """Sends Nesterov's update of a momentum that belongs to the rank (DANA-Slim): v ← μv + g, sent is μv + g.

    The server has to step plainly: SGD with momentum 0, or the momentum counts twice. One rank alone is then SGD with
    Nesterov's momentum, and not what it would be without the gate. Runs on the rank; needs no weights and no staleness.
    Memory: one entry a parameter for v. Blocks that are not dense, real and floating pass as they are.

    Args:
        momentum: μ in [0, 1).

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        I. Hakimi, S. Barkai, M. Gabel, A. Schuster, "Taming momentum in a distributed asynchronous environment", 2019,
        arXiv:1907.11612.
    """

    needs_view = False

    def __init__(self, *, momentum: float = 0.9) -> None:
        require(0.0 <= momentum < 1.0, "momentum", momentum, "lie in [0, 1)", "0.9 is the default")
        self.momentum = momentum
        self._velocities: dict[str, Tensor] = {}

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Send the rank's momentum step.

        Args:
            gradients: gradient of each block by name.
            context: not used.

        Returns:
            The decision; energy 0, weight 1.
        """
        if reason := unsound(gradients):
            return rejection(gradients, reason)
        result = dict(gradients)
        with torch.no_grad():
            for name, gradient in gradients.items():
                if is_filterable(gradient):
                    wide = gradient if gradient.dtype == torch.float64 else gradient.float()
                    before = self._velocities.get(name)
                    velocity = wide.clone() if before is None else wide.add(before.to(wide), alpha=self.momentum)
                    self._velocities[name] = velocity
                    result[name] = torch.empty_like(gradient).copy_(wide.add(velocity, alpha=self.momentum))
        return GateDecision(result)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"dana (μ={self.momentum:g})"

    def state_dict(self) -> dict[str, Any]:
        """Momentum of this rank."""
        return {"velocities": dict(self._velocities)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """
        self._velocities = {name: velocity.clone() for name, velocity in state["velocities"].items()}
