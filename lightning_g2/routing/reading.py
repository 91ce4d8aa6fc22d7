"""What the host reads of one push, and the decision made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_g2.values import GateDecision


@dataclass(slots=True)
class BlockReading:
    """One filtered block of a push after the host has read it.

    Attributes:
        norm: |d_b|, in the gradient's units.
        energy: friction, scaled by the thermal factor where that is asked for; 0 to 8/3.
        scale: lr·|d_b|.
        weight: what the rule decides, 0 to 1.
    """

    norm: float
    energy: float
    scale: float
    weight: float = 1.0


def mean_reading(readings: Mapping[str, BlockReading], what: Literal["energy", "weight"], empty: float) -> float:
    """Mean over blocks with weights |d_b|².

    Args:
        readings: blocks by name.
        what: which number.
        empty: result without blocks.

    Returns:
        The mean; a plain one where all drifts are zero.
    """
    # Norms are scaled by the largest first, so that no square overflows.
    top = max((reading.norm for reading in readings.values()), default=0.0)
    if not readings:
        return empty
    shares = [(reading.norm / top) ** 2 if top > 0.0 else 1.0 for reading in readings.values()]
    values = [getattr(reading, what) for reading in readings.values()]
    return float(sum(share * value for share, value in zip(shares, values, strict=True)) / sum(shares))


def mean_of_decisions(decisions: Sequence[GateDecision]) -> tuple[float, float]:
    """Energy and weight of a push on whose parts a gate has decided one by one.

    Args:
        decisions: the parts; each block is in one of them.

    Returns:
        Means over all blocks with weights |d_b|²; the blocks of rejected parts count with weight 0.
    """
    readings = {
        name: BlockReading(norm, d.block_energy[name], 0.0, 0.0 if d.rejected else d.block_weight[name])
        for d in decisions
        for name, norm in d.block_norm.items()
    }
    return mean_reading(readings, "energy", 0.0), mean_reading(readings, "weight", 1.0)


def decision_of(
    gradients: Mapping[str, Tensor], readings: dict[str, BlockReading], energy: float | None = None, reason: str = ""
) -> GateDecision:
    """Decision made of readings.

    Args:
        gradients: what is sent.
        readings: filtered blocks by name.
        energy: of the whole push, where it is not the blocks' mean.
        reason: why the push is rejected; empty if it is not.

    Returns:
        The decision.
    """
    return GateDecision(
        gradients,
        energy=mean_reading(readings, "energy", 0.0) if energy is None else energy,
        weight=mean_reading(readings, "weight", 1.0),
        block_energy={name: reading.energy for name, reading in readings.items()},
        block_weight={name: reading.weight for name, reading in readings.items()},
        block_norm={name: reading.norm for name, reading in readings.items()},
        scale={name: reading.scale for name, reading in readings.items()},
        rejected=bool(reason),
        reason=reason,
    )
