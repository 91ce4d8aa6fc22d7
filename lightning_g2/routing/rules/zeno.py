"""Pushes that a held-out gradient does not vouch for are not sent."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing.gate import Gate, GateContext, Need, is_filterable, read_push, rejection
from lightning_g2.routing.option import require, require_within
from lightning_g2.values import GateDecision

_PRICE = 0.02


class ZenoGate(Gate):
    """Accepts a push iff its step is estimated to lower a held-out loss (after Zeno++).

        γ<v, g> - ρ|g|² ≥ -γε

    γ is the learning rate, v the gradient of a held-out batch, taken anew every ``refresh`` pushes of the rank. Needs
    current weights and an evaluation. Memory: one entry a parameter for v, and a forward and backward pass at each
    refresh. Blocks that are not dense, real and floating count for nothing and go with the rest.

    Args:
        rho: ρ ≥ 0, the price of a large gradient; None takes γ/50.
        epsilon: ε ≥ 0, how much a push may seem to harm.
        refresh: pushes of the rank that one v serves, ≥ 1.

    Raises:
        ConfigurationError: an option is out of range.

    Source:
        C. Xie, S. Koyejo, I. Gupta, "Zeno++: robust fully asynchronous SGD", ICML 2020, arXiv:1903.07020; the source
        also rescales g to the length of v, which is left out here.
    """

    runs_on = "server"
    simulated_only = "it needs the loss of held-out batches, which the strategy does not evaluate between sync points"

    def __init__(self, *, rho: float | None = None, epsilon: float = 0.1, refresh: int = 8) -> None:
        if rho is not None:
            require_within("rho", rho, 0.0, math.inf, "0 puts no price on size")
        require_within("epsilon", epsilon, 0.0, math.inf, "0 lets no harm pass")
        require(refresh >= 1, "refresh", refresh, "be ≥ 1", "1 takes a held-out gradient for each push")
        self.rho, self.epsilon, self.refresh = rho, epsilon, refresh
        self._held_out: dict[str, Tensor] = {}
        self._pushes = 0

    @property
    def needs(self) -> frozenset[Need]:
        """Current weights and an evaluation."""
        return frozenset({"weights", "evaluate"})

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Accept or reject the push.

        Args:
            gradients: gradient of each block by name.
            context: learning rate, weights and evaluation.

        Returns:
            The decision, with the same tensors; energy 0.

        Raises:
            ConfigurationError: there are no weights or no evaluation.
        """
        due = self._pushes % self.refresh == 0
        held_out = _held_out_gradient(context) if due else self._held_out
        blocks = [name for name, gradient in gradients.items() if is_filterable(gradient)]
        products: list[Tensor] = []
        for name in blocks:
            flat = gradients[name].detach().flatten().double()
            products += [held_out[name].to(flat).flatten() @ flat, flat @ flat]
        reason, read = read_push(gradients, products)
        if reason:
            return rejection(gradients, reason)
        self._held_out, self._pushes = held_out, self._pushes + 1
        rates = [context.lr_of(name) for name in blocks]
        gain = sum(rate * dot for rate, dot in zip(rates, read[0::2], strict=True))
        rate = sum(rates) / max(1, len(rates))
        score = gain - (_PRICE * rate if self.rho is None else self.rho) * sum(read[1::2])
        allowed = -self.epsilon * rate
        if not score >= allowed:
            return rejection(gradients, f"score {score:.3g} is below {allowed:.3g}: a held-out gradient does not agree")
        return GateDecision(gradients)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        return f"zeno (ρ={'γ/50' if self.rho is None else self.rho}, ε={self.epsilon:g})"


def _held_out_gradient(context: GateContext) -> dict[str, Tensor]:
    if context.weights is None or context.evaluate is None:
        raise ConfigurationError(
            "gate 'zeno' without weights and evaluate: both must be in its context; it runs in "
            "lightning_g2.simulate.simulate"
        )
    leaves = {n: weight.detach().clone().requires_grad_(is_filterable(weight)) for n, weight in context.weights.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    with torch.enable_grad():
        loss = context.evaluate(leaves)
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(wanted.items(), found, strict=True)
    }
