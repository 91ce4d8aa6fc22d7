"""PipeMare: corrections for gradients that come late, and whose two passes saw different weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

_FULL_MEMORY = 0.135  # e⁻²: what a drift's average keeps of itself over one delay
_AGE_DECAY = 0.99


class PipeMare:
    """Smaller learning rates for layers with longer delays at first, and backward weights set back by their drift.

        η_l = η / τ_l^p,  p falling from 1 to 0 over the first ``steps`` updates
        u_l = w_l - k·δ_l,  k the updates of the layer between this batch's two passes
        δ_l ← D^(1/k)·δ_l + (1 - D^(1/k))·(w_l' - w_l)   at each update w_l → w_l'

    τ_l is a running mean of the layer's age in versions, at least 1; k in the decay is a running mean as well, so that
    the drift's memory is as long as the delay that it makes good. A drift costs one copy of the parameters.

    Args:
        parameters: the parameters.
        layer_of: layer of each.
        steps: updates of a layer over which p falls.

    Source:
        B. Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training" (arXiv 1910.05124), T1 and T2.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layer_of: Sequence[int], steps: int) -> None:
        layers = max(layer_of) + 1
        self._parameters = parameters
        self._layer_of = layer_of
        self._steps = steps
        self._ages = [1.0] * layers
        self._gaps = [1.0] * layers
        self._updates = [0] * layers
        self.drifts: dict[int, Tensor] = {}

    def rate(self, layer: int, age: int) -> float:
        """Factor for a layer's learning rate; the age is that of the gradient at hand, versions."""
        self._ages[layer] += (1 - _AGE_DECAY) * (age - self._ages[layer])
        power = max(0.0, 1.0 - self._updates[layer] / self._steps)
        return math.pow(max(1.0, self._ages[layer]), -power)

    def observe(self, layer: int, before: dict[int, Tensor], gap: int) -> None:
        """A layer was updated.

        Args:
            layer: its index.
            before: its weights before, by parameter number.
            gap: updates of the layer between the two passes of the batch.
        """
        self._updates[layer] += 1
        self._gaps[layer] += (1 - _AGE_DECAY) * (max(1, gap) - self._gaps[layer])
        keep = _FULL_MEMORY ** (1.0 / self._gaps[layer])
        for number, old in before.items():
            moved = self._parameters[number].data - old
            drift = self.drifts.get(number)
            self.drifts[number] = moved * (1 - keep) if drift is None else drift.lerp(moved, 1 - keep)

    def saving(self, leaves: Sequence[Tensor], gap_of: Callable[[int], int]) -> AbstractContextManager[Any]:
        """Graphs built within multiply, on the way back, with the weights set back by their drift.

        Args:
            leaves: the batch's leaves, by parameter number.
            gap_of: gives, on the way back, the updates of a layer since the batch has read it.
        """
        number_of = {(leaf.data_ptr(), leaf.numel()): n for n, leaf in enumerate(leaves) if leaf.requires_grad}

        def pack(tensor: Tensor) -> Any:
            number = number_of.get((tensor.data_ptr(), tensor.numel())) if tensor.numel() else None
            return tensor if number is None else _Saved(tensor, number)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _Saved):
                result: Tensor = saved
                return result
            gap, drift = gap_of(self._layer_of[saved.number]), self.drifts.get(saved.number)
            if not gap or drift is None:
                return saved.tensor
            with torch.no_grad():
                back: Tensor = self._parameters[saved.number].data - gap * drift
            # The graph may have saved a transposed or reshaped view.
            return back.as_strided(saved.tensor.shape, saved.tensor.stride(), 0)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Saved:
    """A weight that a graph has saved."""

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.tensor, self.number = tensor, number
