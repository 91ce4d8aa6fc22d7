"""The spectral gate: every tracked direction of a matrix is damped by its own energy, on both sides."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_g2.algebra.fano_fisher import MAXIMUM_ENERGY
from lightning_g2.routing.gate import Gate, GateContext, magnitude, to_host
from lightning_g2.routing.option import require, require_choice, require_within
from lightning_g2.routing.reading import BlockReading, decision_of
from lightning_g2.routing.sketch import block_seed
from lightning_g2.routing.spectral import Side, SpectralFrame, SpectralObservation, weigh
from lightning_g2.values import GateDecision

Scale = Literal["unit", "thermal"]
Energies = Literal["own", "mean", "shuffled", "permuted", "age", "constant"]
_ENERGIES = ("own", "mean", "shuffled", "permuted", "age", "constant")
_REMEMBERED = 64


class SpectralGate(Gate):
    """Friction by direction.

    Drift d_b = g_b - r_b against the rank's own gradient EMA r_b, as a matrix D (out × rest). Its leading directions
    u_i (rows) and v_j (columns) are followed push by push; each has an energy E_i = (8/3)|u_iᵀD|²/|D|² in [0, 8/3],
    and those that are not tracked have the mean of what is left. With x = τK/N, Ē = (8/3)/rows and θ = 1, or with
    ``scale="thermal"`` θ = lr|d_b|/max_b:

        w_i = (1 + β·x·θ·E_i/Ē)^-p,   g'_b = W_L g_b W_R,   W = w_0·I + U diag(w - w_0) Uᵀ,

    rescaled to |g_b| with ``norm="block"``. A fresh push (x = 0) leaves with its own tensors, so one rank alone trains
    as without the gate. Vectors, scalars, complex, integer and sparse blocks always pass.

    ``energy`` of the decision: (8/3)·θ·(|UᵀD|² + |DV|²)/(2|D|²); ``weight``: |W_L g W_R|/|g| before rescaling; both
    |d_b|²-weighted means over the filtered blocks. Memory: one float32 a parameter of filtered blocks for r, and
    what :class:`SpectralFrame` says.

    Args:
        beta: inverse temperature β ≥ 0; 0 turns the gate off.
        power: p > 0.
        rank: directions followed on each side.
        scale: ``"unit"``: θ = 1; ``"thermal"``: θ = lr|d_b|/max_b, which opens as lr·|d| falls.
        norm: ``"block"`` sends |g_b| as it was, in other directions; ``"none"`` sends less.
        eta: share of the newest drift in the frames, in (0, 1].
        reference_decay: decay of r per push, in [0, 1).
        energies: ``"own"``: of the push itself. Controls: ``"mean"``: running mean of the rank's pushes;
            ``"shuffled"``: of one of its last 64 pushes, drawn at random; ``"permuted"``: exchanged at random among
            all directions of a side; ``"age"``: all tracked ones alike, (8/3)/r; ``"constant"``:
            tracked ones weigh ``constant``, others 1.
        constant: weight under ``energies="constant"``, in [0, 1].
        directions: ``"tracked"``, or ``"random"``, a control: fixed random ones with their own energies.
        seed: of start bases and controls.

    Raises:
        ConfigurationError: an option is unknown or out of range.

    Source:
        This package. Two-sided weighing is kin of Shampoo (V. Gupta et al. 2018) and K-FAC (J. Martens, R. Grosse
        2015); Gibbs weights by age and energy after doi:10.5281/zenodo.20077198.
    """

    def __init__(
        self,
        *,
        beta: float = 4.0,
        power: float = 1.0,
        rank: int = 16,
        scale: Scale = "thermal",
        norm: Literal["block", "none"] = "block",
        eta: float = 0.2,
        reference_decay: float = 0.9,
        energies: Energies = "own",
        constant: float = 0.0,
        directions: Literal["tracked", "random"] = "tracked",
        seed: int = 0,
    ) -> None:
        require_within("beta", beta, 0.0, math.inf, "0 turns the gate off")
        require(0.0 < power < math.inf, "power", power, "be > 0 and finite", "1 is the default")
        require(rank >= 1, "rank", rank, "be ≥ 1", "16 is the default")
        require_choice("scale", scale, ("unit", "thermal"))
        require_choice("norm", norm, ("block", "none"))
        require(0.0 < eta <= 1.0, "eta", eta, "lie in (0, 1]", "0.2 is the default")
        require(0.0 <= reference_decay < 1.0, "reference_decay", reference_decay, "lie in [0, 1)", "0.9 is the default")
        require_choice("energies", energies, _ENERGIES)
        require_within("constant", constant, 0.0, 1.0, "1 turns the gate off")
        require_choice("directions", directions, ("tracked", "random"))
        self.beta, self.power, self.rank, self.scale, self.norm = beta, power, rank, scale, norm
        self.eta, self.reference_decay, self.energies, self.constant = eta, reference_decay, energies, constant
        self.directions, self.seed = directions, seed
        self._frames: dict[str, SpectralFrame] = {}
        self._references: dict[str, Tensor] = {}
        self._past: dict[tuple[str, int], deque[Tensor]] = {}
        self._draw = Random(block_seed(seed, "controls"))

    @property
    def blockwise(self) -> bool:
        """Directions belong to a block."""
        return True

    @property
    def staleness_cost(self) -> float:
        """As under the g2 gate; not measured by itself."""
        return 0.25

    def decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        """Decide on one push; see the class and the contract of :class:`Gate`.

        Args:
            gradients: gradient of each block by name.
            context: staleness, scale and learning rate.

        Returns:
            The decision.
        """
        first = next(iter(gradients.values()), None)
        # A caller's autocast would round the products to half precision.
        with torch.no_grad(), torch.autocast("cpu" if first is None else first.device.type, enabled=False):
            return self._decide(gradients, context)

    def describe(self) -> str:
        """See :meth:`Gate.describe`."""
        control = "" if self.energies == "own" else f", {self.energies} energies"
        control += "" if self.directions == "tracked" else ", random directions"
        return f"g2_spectral (rank {self.rank}, {self.scale}, β={self.beta:g}, p={self.power:g}{control})"

    def state_dict(self) -> dict[str, Any]:
        """References and frames of this rank."""
        frames = {name: (frame.shape, frame.state_dict()) for name, frame in self._frames.items()}
        return {"references": dict(self._references), "frames": frames}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Args:
            state: of a gate with the same options.
        """
        self._references = {name: reference.clone() for name, reference in state["references"].items()}
        self._frames = {}
        for name, (shape, frame) in state["frames"].items():
            self._frame(name, tuple(shape)).load_state_dict(frame)

    def _decide(self, gradients: Mapping[str, Tensor], context: GateContext) -> GateDecision:
        blocks: dict[str, tuple[Tensor, SpectralObservation]] = {}
        result = dict(gradients)
        numbers: list[Tensor] = []
        probes: dict[str, Tensor] = {}
        for name, tensor in gradients.items():
            if not self._filters(tensor):
                if (size := magnitude(tensor)) is not None:
                    probes[name] = size
                continue
            gradient = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
            reference = self._references.get(name)
            drift = gradient if reference is None else gradient - reference.to(gradient)
            seen = self._frame(name, tuple(tensor.shape)).observe(drift)
            heat = self._heat(name, seen.norm, context)
            weight = torch.ones_like(seen.norm)
            if context.age > 0.0 and self.beta > 0.0:
                result[name], weight = self._weighed(name, gradient, seen, heat * context.age, tensor)
            blocks[name] = (gradient, seen)
            numbers += [seen.norm, seen.energy * heat, weight]
        host = to_host([*numbers, *probes.values()])
        sound = dict(zip(blocks, (all(map(math.isfinite, host[i : i + 2])) for i in range(0, len(numbers), 3)), strict=True))  # noqa: E501 # fmt: skip
        sound |= dict(zip(probes, map(math.isfinite, host[len(numbers) :]), strict=True))
        for name in gradients:
            if not sound.get(name, True):
                reason = f"NaN, Inf or a norm beyond its dtype's range in {name}"
                return GateDecision(gradients, weight=0.0, rejected=True, reason=reason)
        self._commit(blocks)
        readings = {
            name: BlockReading(norm, energy, context.lr_of(name) * norm, min(1.0, weight))
            for name, norm, energy, weight in zip(
                blocks, host[0 : len(numbers) : 3], host[1 : len(numbers) : 3], host[2 : len(numbers) : 3], strict=True
            )
        }
        return decision_of(result, readings)

    def _filters(self, tensor: Tensor) -> bool:
        if not tensor.dtype.is_floating_point or tensor.layout != torch.strided or tensor.numel() == 0:
            return False
        return SpectralFrame.fits(tuple(tensor.shape))

    def _frame(self, name: str, shape: tuple[int, ...]) -> SpectralFrame:
        if name not in self._frames:
            seed = block_seed(self.seed, name)
            follows = self.directions == "tracked"
            self._frames[name] = SpectralFrame(shape, rank=self.rank, eta=self.eta, seed=seed, follows=follows)
        return self._frames[name]

    def _heat(self, name: str, norm: Tensor, context: GateContext) -> Tensor:
        """Thermal factor θ, shape (), in [0, 1]."""
        observed = norm * context.lr_of(name)
        if self.scale == "unit":
            return torch.ones_like(observed)
        hottest = observed.clamp_min(context.scale.get(name, 0.0))
        # Without any scale yet (learning rate 0 in a warm-up, zero drift) the energy stays as it is.
        return torch.where(hottest > 0.0, observed / hottest.clamp_min(torch.finfo(hottest.dtype).tiny), 1.0)

    def _weighed(
        self, name: str, gradient: Tensor, seen: SpectralObservation, strength: Tensor, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The block as it is sent, and its weight."""
        matrix = gradient.reshape(gradient.shape[0], -1)
        left = self._weights((name, 0), seen.left, strength)
        right = self._weights((name, 1), seen.right, strength)
        weighed = weigh(matrix, left, right)
        before, after = torch.linalg.vector_norm(matrix), torch.linalg.vector_norm(weighed)
        tiny = torch.finfo(matrix.dtype).tiny
        if self.norm == "block":
            weighed = weighed * (before / after.clamp_min(tiny))
        sent = torch.empty_like(like).copy_(weighed.reshape(like.shape))
        return sent, torch.where(before > 0.0, after / before.clamp_min(tiny), 1.0)

    def _weights(self, key: tuple[str, int], side: Side, strength: Tensor) -> tuple[Side, Tensor, Tensor]:
        """Directions of one side, weights of the tracked ones and of all others."""
        rows, rank = side.basis.shape
        energies = side.energies
        if self.energies == "constant":
            return side, torch.full_like(energies, self.constant), torch.ones_like(strength)
        if self.energies == "mean":
            energies = side.mean
        elif self.energies == "age":
            energies = torch.full_like(energies, MAXIMUM_ENERGY / rank)
        elif self.energies == "shuffled":
            past = [*self._past.get(key, ()), energies]
            energies = past[self._draw.randrange(len(past))].to(energies)
        rest = side.rest(energies)
        if self.energies == "permuted":
            every = [*range(rank), *[rank] * (rows - rank)]  # rank: one of those that are not tracked
            order = torch.tensor(self._draw.sample(every, rank), device=energies.device)
            energies = torch.cat([energies, rest.unsqueeze(0)]).index_select(0, order)
            rest = side.rest(energies)
        scaled = strength * self.beta * rows / MAXIMUM_ENERGY
        return side, (1.0 + scaled * energies) ** -self.power, (1.0 + scaled * rest) ** -self.power

    def _commit(self, blocks: Mapping[str, tuple[Tensor, SpectralObservation]]) -> None:
        share = 1.0 - self.reference_decay
        for name, (gradient, seen) in blocks.items():
            self._frames[name].commit(seen)
            if self.energies == "shuffled":
                for side, energies in enumerate((seen.left.energies, seen.right.energies)):
                    self._past.setdefault((name, side), deque(maxlen=_REMEMBERED)).append(energies)
            reference = self._references.get(name)
            self._references[name] = (
                gradient * share if reference is None else torch.lerp(reference.to(gradient), gradient, share)
            )
