"""Updates applied right here: clip, gate, step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_g2.decoupled.optimizer import SharedOptimizer
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.update import GradientUpdate
from lightning_g2.routing import Gate, GateContext, GateDecision, build_gate

_SCALE_DECAY = 0.9995


class LocalApply:
    """Applies updates to this process's own weights, lock-free; an :data:`Apply`.

    Args:
        optimizer: the module's.
        parameters: the module's, by name.
        options: how gradients are clipped, and whose the optimizer's state is.
        gate: name of the gate that each layer's gradients go through, or None.
        gate_options: its keyword options.

    Attributes:
        rejected: updates that a gate has refused.
        on_decision: called with an update and what its gate has decided.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        options: DecoupledOptions,
        *,
        gate: str | None = None,
        gate_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._optimizer = SharedOptimizer(optimizer, parameters, private=options.private_state)
        self._parameters = parameters
        self._options = options
        self._build = None if gate is None else (lambda: build_gate(gate, **(gate_options or {})))
        if self._build is not None:
            self._build()  # an option that the gate refuses is refused here
        self._gates: dict[tuple[str, ...], _LayerGate] = {}
        self._making = threading.Lock()
        self.rejected = 0
        self.on_decision: Callable[[GradientUpdate, GateDecision], None] | None = None

    def __call__(self, update: GradientUpdate) -> None:
        """See :data:`~lightning_g2.decoupled.update.Apply`."""
        clip_(update.gradients, self._options)
        gradients = update.gradients if self._build is None else self._route(update, self._build)
        if gradients is not None:
            self._optimizer.step(gradients, _by_parameter(update))

    def _route(self, update: GradientUpdate, build: Callable[[], Gate]) -> Mapping[str, Tensor] | None:
        with self._making:
            if update.layers not in self._gates:
                self._gates[update.layers] = _LayerGate(build(), self._options.graphs)
        decision = self._gates[update.layers].route(update, self._optimizer, self._parameters)
        if self.on_decision is not None:
            self.on_decision(update, decision)
        if decision.rejected:
            with self._making:
                self.rejected += 1
            return None
        return decision.gradients


class _LayerGate:
    """The gate of one layer. It learns from all threads' gradients, so they pass one at a time."""

    def __init__(self, gate: Gate, concurrency: int) -> None:
        self._gate = gate
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._window: dict[int, float] = {}
        self._scale: dict[str, float] = {}
        self._step = 0

    def route(
        self, update: GradientUpdate, optimizer: SharedOptimizer, parameters: Mapping[str, nn.Parameter]
    ) -> GateDecision:
        """What the gate says of an update."""
        with self._lock:
            weights = {n: parameters[n].data for n in update.gradients} if "weights" in self._gate.needs else None
            context = GateContext(
                rank=update.lane,
                staleness=max(update.ages.values(), default=0),
                concurrency=self._concurrency,
                lr={name: optimizer.rate(name) for name in update.gradients},
                step=self._step,
                window=dict(self._window),
                scale=dict(self._scale),
                weights=weights,
            )
            decision = self._gate.decide(update.gradients, context)
            self._step += 1
            if not decision.rejected:
                self._window[update.lane] = decision.energy * context.age
                for block, observed in decision.scale.items():
                    self._scale[block] = max(_SCALE_DECAY * self._scale.get(block, 0.0), observed)
            return decision


def clip_(gradients: Mapping[str, Tensor], options: DecoupledOptions) -> None:
    """Clip the gradients of one update in place, by value and then by their common norm.

    Args:
        gradients: of one layer, or of all (``update="block"``); with ``clip_scope="layer"`` each layer's own norm
            counts, and the layer of a parameter is what its name says before the last dot.
        options: what to clip to.
    """
    if options.clip_value is not None:
        torch.nn.utils.clip_grad_value_(_holders(gradients), options.clip_value)
    if options.clip_norm is None:
        return
    parts: dict[str, dict[str, Tensor]] = {}
    for name, gradient in gradients.items():
        layer = "" if options.clip_scope == "global" else name.rpartition(".")[0]
        parts.setdefault(layer, {})[name] = gradient
    for part in parts.values():
        torch.nn.utils.clip_grad_norm_(_holders(part), options.clip_norm)


def _holders(gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors whose ``.grad`` these are, as torch's clipping wants them."""
    holders = []
    for gradient in gradients.values():
        holder = torch.empty_like(gradient)
        holder.grad = gradient
        holders.append(holder)
    return holders


def _by_parameter(update: GradientUpdate) -> dict[str, float]:
    if not update.rates:
        return {}
    return {name: update.rates[name.rpartition(".")[0]] for name in update.gradients}
