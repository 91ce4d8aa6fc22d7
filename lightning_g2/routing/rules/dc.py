"""Delay compensation by the diagonal of the gradient's outer product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_g2.routing.gate import Gate, GateContext, Need, is_filterable, rejection, unsound
from lightning_g2.routing.option import require, require_within
from lightning_g2.values import GateDecision

_EPSILON = 1e-7


class DelayCompensationGate(Gate):
    """Moves a gradient from the weights it was computed on to the current ones, to first order (DC-ASGD-a).

        g' = g + λ_t g⊙g⊙(w_now - w_then),   λ_t = λ0/√(m_t + 1e-7),   m_t = d·m_{t-1} + (1-d)·g⊙g

    g⊙g stands for the diagonal of the Hessian. Runs on the rank; needs base and current weights, so that a stale push
    costs a rank of a real run one more transfer of the weights. Memory: one float32 a parameter for m. A push with
    τ = 0 leaves with its own tensors. Blocks that are not dense, real and floating pass.

    Args:
        strength: λ0 ≥ 0; 0 turns the rule off.
        decay: d in [0, 1).

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017,
        arXiv:1609.08326.
    """

    def __init__(self, *, strength: float = 2.0, decay: float = 0.95) -> None:
        require_within("strength", strength, 0.0, math.inf, "0 turns the rule off")
        require(0.0 <= decay < 1.0, "decay", decay, "lie in [0, 1)", "0.95 is the source's")
        self.strength, self.decay = strength, decay
        self._squares: dict[str, Tensor] = {}

    @property
    def needs(self) -> frozenset[Need]:
        """Both weights."""
        return frozenset({"weights", "base_weights"})

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Compensate the push for its delay.

        Args:
            gradients: gradient of each block by name.
            context: both weights and the staleness.

        Returns:
            The decision; energy 0, weight 1.
        """
        with torch.no_grad():
            squares = {name: self._square(name, g) for name, g in gradients.items() if is_filterable(g)}
            result = dict(gradients)
            if context.staleness > 0:
                for name, square in squares.items():
                    result[name] = self._compensated(name, gradients[name], square, context)
            changed = {name: g for name, g in result.items() if g is not gradients[name]}
            probes = {**gradients, **{f"{name} (compensated)": g for name, g in changed.items()}}
            if reason := unsound(probes):
                return rejection(gradients, reason)
        self._squares.update(squares)
        return GateDecision(result if changed else gradients)

    def _square(self, name: str, gradient: Tensor) -> Tensor:
        wide = gradient if gradient.dtype == torch.float64 else gradient.float()
        square = wide.square().mul_(1.0 - self.decay)
        before = self._squares.get(name)
        return square if before is None else square.add_(before.to(square), alpha=self.decay)

    def _compensated(self, name: str, gradient: Tensor, square: Tensor, context: GateContext) -> Tensor:
        if not context.weights or not context.base_weights or name not in context.base_weights:
            return gradient
        wide = gradient.to(square.dtype)
        moved = context.weights[name].to(square) - context.base_weights[name].to(square)
        strength = square.add(_EPSILON).rsqrt_().mul_(self.strength)
        compensated = wide + strength * wide.square() * moved
        return torch.empty_like(gradient).copy_(compensated)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"dc (λ0={self.strength:g})"

    def state_dict(self) -> dict[str, Any]:
        """Mean squares of this rank."""
        return {"squares": dict(self._squares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """
        self._squares = {name: square.clone() for name, square in state["squares"].items()}
