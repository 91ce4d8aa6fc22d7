"""The g2 gate: friction of a push's drift decides how much of its ridge is let through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_g2.routing.gate import Gate, GateContext, Need, magnitude, to_host
from lightning_g2.routing.mge import age_weight, local_weight, relative_weight, vacuum_weight
from lightning_g2.routing.option import require, require_choice, require_within
from lightning_g2.routing.random_frame import RandomFrame
from lightning_g2.routing.reading import BlockReading, decision_of, mean_reading
from lightning_g2.routing.ridge import Form, RidgeFrame, RidgeObservation
from lightning_g2.routing.sketch import block_seed
from lightning_g2.values import GateDecision

FrameName = Literal["adaptive", "random"]
Scale = Literal["unit", "thermal"]
RESCUE_WEIGHT = 0.5
"""Weight above which a push is calm enough to be sent at any age."""

WeightRule = Literal["mge", "local", "constant", "age", "relative"]
Action = Literal["ridge", "scalar"]


@dataclass(slots=True)
class _Block:
    """One filtered block of the push under decision; tensors stay on the device."""

    name: str
    gradient: Tensor
    norm: Tensor
    energy: Tensor
    observation: RidgeObservation | None = None


class G2Gate(Gate):
    """Friction-gated pushes.

    Drift d_b = g_b - r_b against the rank's own gradient EMA r_b; friction E_b in [0, 8/3] from a frame; effective
    energy Ê_b = E_b·x with relative age x = τK/N; weight w_b by a rule over the window of live ranks; then

    - ``action="ridge"``: g'_b = g_b - (1-w_b) U Uᵀ g_b for each matrix block with more than ``rank`` rows and columns;
      vectors, scalars and thin blocks pass whole;
    - ``action="scalar"``: the whole push times one weight, and not sent at all below ``reject_below``.

    A fresh push (τ = 0) has weight exactly 1 and leaves with its own tensors, so one rank alone trains as without the
    gate. Complex, integer and sparse blocks always pass. r_b starts at zero and is updated after the decision; memory
    is one float32 per parameter of filtered blocks for r, plus what :class:`RidgeFrame` says.

    ``energy`` and ``weight`` of the decision are |d_b|²-weighted means over the filtered blocks (0 and 1 without any).
    With ``scale="thermal"`` the energies reported are the scaled ones, so Ê = energy·x in either case. With the random
    frame and ``action="scalar"``, as in the source, energy is that of the summed sketch of all floating blocks.

    Args:
        frame: ``"adaptive"`` follows each block's drift; ``"random"`` is the source's seeded sketch (and, with
            ``action="ridge"``, a fixed random subspace: a control).
        scale: ``"unit"``: E; ``"thermal"``: E·min(1, lr|d_b|/max_b), which opens as lr·|d| falls.
        weight_rule: ``"mge"`` Gibbs with vacuum; ``"local"``, ``"constant"``, ``"age"`` controls; ``"relative"`` the
            source's.
        action: what a weight does.
        beta: inverse temperature ≥ 0; 0 turns the gate off.
        constant: the weight under ``weight_rule="constant"``, in [0, 1].
        reject_below: smallest weight that is still sent under ``action="scalar"``, in [0, 1]; 0 sends all.
        bounded_delay: largest delay at which a push is sent whatever its weight, as a multiple of the delay N-1 that N
            ranks of equal speed have, ≥ 1. An older push is sent only when it is calm enough for a weight above one
            half: it is rescued from what would else be a bounded-delay rule. None or inf sends pushes of any age; so
            does a job of one rank.
        rank: directions of a ridge.
        eta: share of the newest drift in a frame, in (0, 1].
        reference_decay: decay of r per push, in [0, 1).
        form: see :class:`RidgeFrame`.
        frames: sketches averaged by the random frame.
        seed: of hashes and start bases.

    Raises:
        ConfigurationError: an option is unknown or out of range.

    Source:
        doi:10.5281/zenodo.20077198 (random frame, scalar action, relative rule); the adaptive frame, the
        ridge action and the vacuum are this package's.
    """

    def __init__(
        self,
        *,
        frame: FrameName = "adaptive",
        scale: Scale = "thermal",
        weight_rule: WeightRule = "mge",
        action: Action = "ridge",
        beta: float = 32.0,
        constant: float = 0.0,
        reject_below: float = 0.0,
        bounded_delay: float | None = None,
        rank: int = 4,
        eta: float = 0.2,
        reference_decay: float = 0.9,
        form: Form = "auto",
        frames: int = 1,
        seed: int = 0,
    ) -> None:
        require_choice("frame", frame, ("adaptive", "random"))
        require_choice("scale", scale, ("unit", "thermal"))
        require_choice("weight_rule", weight_rule, ("mge", "local", "constant", "age", "relative"))
        require_choice("action", action, ("ridge", "scalar"))
        require_choice("form", form, ("auto", "covariance", "power"))
        require_within("beta", beta, 0.0, math.inf, "0 turns the gate off")
        require_within("constant", constant, 0.0, 1.0, "1 turns the gate off")
        require_within("reject_below", reject_below, 0.0, 1.0, "0 sends every push")
        if bounded_delay is not None:
            require(bounded_delay >= 1.0, "bounded_delay", bounded_delay, "be ≥ 1", "inf sends pushes of any age")
        require(rank >= 1, "rank", rank, "be ≥ 1", "4 is the rank of the Fano-Fisher metric")
        require(0.0 < eta <= 1.0, "eta", eta, "lie in (0, 1]", "0.2 is the default")
        require(0.0 <= reference_decay < 1.0, "reference_decay", reference_decay, "lie in [0, 1)", "0.9 is the default")
        self.frame, self.scale, self.weight_rule, self.action = frame, scale, weight_rule, action
        self.beta, self.constant, self.reject_below, self.bounded_delay = beta, constant, reject_below, bounded_delay
        self.rank, self.eta, self.reference_decay, self.form, self.seed = rank, eta, reference_decay, form, seed
        self._random = RandomFrame(seed=seed, frames=frames) if frame == "random" else None
        self._ridges: dict[str, RidgeFrame] = {}
        self._references: dict[str, Tensor] = {}

    @property
    def staleness_cost(self) -> float:
        """A quarter where tracked drift is taken out of old pushes, see docs/decisions/2026-12-01-rounds-auto.md."""
        return 0.25 if self.frame == "adaptive" and self.action == "ridge" and self.beta > 0.0 else 1.0

    @property
    def needs(self) -> frozenset[Need]:
        """The random frame turns with the weights; the adaptive one needs nothing."""
        return frozenset() if self._random is None else frozenset({"weights"})

    @property
    def blockwise(self) -> bool:
        """A ridge belongs to a block; one weight for the whole push does not."""
        return self.action == "ridge"

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Decide on one push; see the class and the contract of :class:`Gate`.

        Args:
            gradients: gradient of each block by name.
            context: staleness, window, scale and learning rate; weights for the random frame.

        Returns:
            The decision.
        """
        first = next(iter(gradients.values()), None)
        # A caller's autocast would round the products to half precision.
        with torch.no_grad(), torch.autocast("cpu" if first is None else first.device.type, enabled=False):
            return self._decide(gradients, context)

    def _decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        blocks, probes = self._observe(gradients, context)
        whole = [] if self._random is None else [self._random.energy_of_push()]
        values = [value for block in blocks for value in (block.norm, block.energy)]
        host = to_host([*values, *probes.values(), *whole])
        norms, energies = host[0 : len(values) : 2], host[1 : len(values) : 2]
        checked = dict(zip([*(b.name for b in blocks), *probes], [*norms, *host[len(values) :]], strict=False))
        for name in gradients:
            if not math.isfinite(checked.get(name, 0.0)):
                reason = f"NaN, Inf or a norm beyond its dtype's range in {name}"
                return GateDecision(gradients, weight=0.0, rejected=True, reason=reason)
        readings = {
            block.name: self._reading(block.name, norm, energy, context)
            for block, norm, energy in zip(blocks, norms, energies, strict=True)
        }
        self._commit(blocks)
        if self.action == "ridge":
            return self._damp(gradients, blocks, readings, context)
        return self._scale_whole(gradients, readings, context, host[-1] if whole else None)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        strength = f"w={self.constant:g}" if self.weight_rule == "constant" else f"β={self.beta:g}"
        bound = "" if self.bounded_delay is None else f", bounded delay {self.bounded_delay:g}"
        return f"g2 ({self.frame} {self.action}, {self.scale} {self.weight_rule}, {strength}{bound})"

    def state_dict(self) -> dict[str, Any]:
        """References and frames of this rank."""
        return {
            "references": dict(self._references),
            "ridges": {name: (ridge.shape, ridge.state_dict()) for name, ridge in self._ridges.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """
        self._references = {name: reference.clone() for name, reference in state["references"].items()}
        self._ridges = {}
        for name, (shape, ridge_state) in state["ridges"].items():
            self._ridge(name, tuple(shape)).load_state_dict(ridge_state)

    def _observe(self, gradients: Mapping[str, Tensor], context: GateContext) -> tuple[list[_Block], dict[str, Tensor]]:
        """Launch all device work that precedes the one read: drifts, frames, energies; probes of unfiltered blocks."""
        if self._random is not None:
            self._random.begin(context.weights, next(iter(gradients.values()), torch.zeros(())))
        blocks: list[_Block] = []
        probes: dict[str, Tensor] = {}
        for name, tensor in gradients.items():
            if self._filters(tensor):
                blocks.append(self._observe_block(name, tensor.detach()))
            elif (size := magnitude(tensor)) is not None:
                probes[name] = size
        return blocks, probes

    def _observe_block(self, name: str, tensor: Tensor) -> _Block:
        gradient = tensor if tensor.dtype == torch.float64 else tensor.float()
        reference = self._references.get(name)
        drift = gradient if reference is None else gradient - reference.to(gradient)
        if self._random is not None:
            norm = torch.linalg.vector_norm(drift)
            return _Block(name, gradient, norm, self._random.energy(name, drift))
        observation = self._ridge(name, tuple(tensor.shape)).observe(drift)
        return _Block(name, gradient, observation.norm, observation.energy, observation)

    def _filters(self, tensor: Tensor) -> bool:
        if not tensor.dtype.is_floating_point or tensor.layout != torch.strided or tensor.numel() == 0:
            return False
        if self.action == "scalar" and self._random is not None:
            return True
        return RidgeFrame.fits(tuple(tensor.shape), self.rank)

    def _ridge(self, name: str, shape: tuple[int, ...]) -> RidgeFrame:
        ridge = self._ridges.get(name)
        if ridge is None:
            seed = block_seed(self.seed, name)
            ridge = RidgeFrame(shape, rank=self.rank, eta=self.eta, form=self.form, seed=seed)
            self._ridges[name] = ridge
        return ridge

    def _reading(self, name: str, norm: float, energy: float, context: GateContext) -> BlockReading:
        observed = context.lr_of(name) * norm
        if self.scale == "thermal":
            hottest = max(context.scale.get(name, 0.0), observed)
            # Without any scale yet (learning rate 0 in a warm-up, zero drift) the energy stays as it is.
            energy *= observed / hottest if hottest > 0.0 else 1.0
        return BlockReading(norm, energy, observed)

    def _weight(self, energy: float, context: GateContext) -> float:
        age = context.age
        if age == 0.0:
            return 1.0
        if self.weight_rule == "constant":
            return self.constant
        if self.weight_rule == "age":
            return age_weight(age, self.beta)
        if self.weight_rule == "local":
            return local_weight(energy * age, self.beta)
        others = [value for rank, value in context.window.items() if rank != context.rank]
        rule = vacuum_weight if self.weight_rule == "mge" else relative_weight
        return rule(energy * age, others, self.beta)

    def _too_old(self, weight: float, context: GateContext) -> str:
        """Why a push beyond the bounded delay is not sent; empty for one that is young or rescued."""
        if self.bounded_delay is None or context.concurrency < 2 or weight > RESCUE_WEIGHT:
            return ""
        limit = self.bounded_delay * (context.concurrency - 1)
        delay = context.staleness * context.pushes_per_version
        if delay <= limit:
            return ""
        return f"delay {delay} is above {limit:g} (bounded_delay={self.bounded_delay:g}), weight {weight:.3g} no rescue"

    def _commit(self, blocks: list[_Block]) -> None:
        share = 1.0 - self.reference_decay
        known = [block for block in blocks if block.name in self._references]
        for block in blocks:
            if block.observation is not None:
                self._ridges[block.name].commit(block.observation)
            if block.name not in self._references:
                self._references[block.name] = block.gradient * share
        if known:
            aligned = [self._references[block.name].to(block.gradient) for block in known]
            torch._foreach_lerp_(aligned, [block.gradient for block in known], share)
            self._references.update(zip((block.name for block in known), aligned, strict=True))

    def _damp(
        self,
        gradients: Mapping[str, Tensor],
        blocks: list[_Block],
        readings: dict[str, BlockReading],
        context: GateContext,
    ) -> GateDecision:
        for reading in readings.values():
            reading.weight = self._weight(reading.energy, context)
        if reason := self._too_old(mean_reading(readings, "weight", 1.0), context):
            return decision_of(gradients, readings, reason=reason)
        result = dict(gradients)
        for block in blocks:
            if (weight := readings[block.name].weight) < 1.0:
                tensor = gradients[block.name]
                result[block.name] = self._ridge(block.name, tuple(tensor.shape)).filter(tensor, weight)
        return decision_of(result, readings)

    def _scale_whole(
        self,
        gradients: Mapping[str, Tensor],
        readings: dict[str, BlockReading],
        context: GateContext,
        whole: float | None,
    ) -> GateDecision:
        energy = mean_reading(readings, "energy", 0.0) if whole is None else whole
        weight = self._weight(energy, context) if readings else 1.0
        for reading in readings.values():
            reading.weight = weight
        if weight < self.reject_below:
            reason = f"weight {weight:.3g} is below reject_below={self.reject_below:g}"
            return decision_of(gradients, readings, energy, reason)
        if reason := self._too_old(weight, context):
            return decision_of(gradients, readings, energy, reason)
        if weight == 1.0:
            return decision_of(gradients, readings, energy)
        scaled = {n: g * weight if g.dtype.is_floating_point and not g.is_sparse else g for n, g in gradients.items()}
        return decision_of(scaled, readings, energy)
