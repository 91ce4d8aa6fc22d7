"""Gradients are computed on the weights that the server is expected to have when they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_g2.routing.gate import GateContext, is_filterable
from lightning_g2.routing.option import require
from lightning_g2.routing.rules.none import NoneGate
from lightning_g2.values import GateDecision


class PredictGate(NoneGate):
    """Computes gradients τ versions ahead, along the optimizer's direction, and passes every finite push.

        ŵ = w + τ·δ,   δ ← decay·δ + (1-decay)·(w_v - w_u)/(v - u)

    w_u and w_v are the weights of two consecutive reads of the rank, so δ is the optimizer's mean step per version,
    whatever optimizer that is; τ is the staleness of the rank's last push. Memory: two entries a parameter and rank,
    the last weights and δ.

    Args:
        decay: of δ per read, in [0, 1).

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        C.-C. Chen, C.-L. Yang, H.-Y. Cheng, "Efficient and robust parallel DNN training through model parallelism on
        multi-GPU platform" (SpecTrain), 2018, arXiv:1809.02839, along the momentum; B. Yang et al., "PipeMare:
        asynchronous pipeline parallel DNN training", MLSys 2021, arXiv:1910.05124, along a mean of steps.
    """

    needs_view = True
    simulated_only = "ranks of a real run compute gradients on the weights that they have loaded, unchanged"

    def __init__(self, *, decay: float = 0.9) -> None:
        require(0.0 <= decay < 1.0, "decay", decay, "lie in [0, 1)", "0.9 is the default")
        self.decay = decay
        self._delay = 0
        self._last: tuple[int, dict[str, Tensor]] | None = None
        self._steps: dict[str, Tensor] = {}

    def look_ahead(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """See :meth:`Gate.look_ahead`."""
        moving = {name: weight for name, weight in weights.items() if is_filterable(weight)}
        if self._last is not None and version > self._last[0]:
            versions, before = version - self._last[0], self._last[1]
            for name, weight in moving.items():
                step = (weight - before[name]) / versions
                known = self._steps.get(name)
                self._steps[name] = step if known is None else torch.lerp(step, known, self.decay)
        if self._last is None or version > self._last[0]:
            self._last = version, {name: weight.clone() for name, weight in moving.items()}
        if self._delay == 0 or not self._steps:
            return weights
        return {**weights, **{n: w.add(self._steps[n], alpha=self._delay) for n, w in moving.items()}}

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Pass the push and learn its staleness.

        Args:
            gradients: gradient of each block by name.
            context: staleness.

        Returns:
            The decision, with the same tensors.
        """
        self._delay = context.staleness
        return super().decide(gradients, context)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"predict (decay {self.decay:g})"

    def state_dict(self) -> dict[str, Any]:
        """What this rank has learnt of steps and delays."""
        return {"delay": self._delay, "last": self._last, "steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """
        self._delay, self._last, self._steps = state["delay"], state["last"], dict(state["steps"])
