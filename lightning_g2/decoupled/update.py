"""What a backward pass hands over: the seam between the threads and whoever owns the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GradientUpdate:
    """Gradients of one layer, or of all layers at once.

    Attributes:
        layers: names of the layers.
        gradients: by parameter name; the receiver may write to them and keep them.
        base_versions: version of each of the layers that the gradients were computed from, by layer name.
        ages: updates of each layer since, by layer name.
        rates: factor for each layer's learning rate, by layer name; empty without a correction.
        lane: the thread that hands it over: backward threads from 0, or forward threads where those walk back too.
        sequence: number of the update within its lane, from 0, without gaps.
        batch: number of the last batch behind it.
        stamp: what the runner's ``stamp`` said when the forward pass began, such as the server's version that the
            weights were of; None without one.
    """

    layers: tuple[str, ...]
    gradients: Mapping[str, Tensor]
    base_versions: Mapping[str, int]
    ages: Mapping[str, int]
    rates: Mapping[str, float]
    lane: int
    sequence: int
    batch: int
    stamp: Any = None


Apply = Callable[[GradientUpdate], None]
"""Updates the weights, or sends the gradients to whoever does. Called by several threads at once."""
