"""What the user's own code changes in a rank's weights between two loads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LoadedWeights:
    """Remembers what a rank's parameters were loaded with, and finds those that have been changed since.

    Under the optimizer's hand nothing changes on a rank: it is the server that steps. What differs from the weights
    that came is the work of the user's code or of a callback (weights that are clipped, reset, averaged, re-drawn), and
    the next load would undo it.

    Args:
        parameters: the rank's parameters.
        keep: keep copies; otherwise the buffer that the weights arrived in stands for them until :meth:`forget`.
    """

    def __init__(self, parameters: Sequence[Tensor], *, keep: bool) -> None:
        self._parameters = parameters
        self._keep = keep
        self._loaded: list[Tensor] | None = None

    def remember(self, arrived: Sequence[Tensor]) -> None:
        """The parameters now hold what has arrived.

        Args:
            arrived: one CPU tensor for each parameter, of its shape.
        """
        self._loaded = [
            arrived[i] if not self._keep and _alike(arrived[i], p) else p.detach().clone()
            for i, p in enumerate(self._parameters)
        ]

    def forget(self) -> None:
        """The buffer is about to be written anew: until the next load nothing can be said."""
        if not self._keep:
            self._loaded = None

    def changed(self) -> tuple[int, ...]:
        """Indices of the parameters that differ from what they were loaded with."""
        if self._loaded is None:
            return ()
        pairs = list(zip(self._parameters, self._loaded, strict=True))
        if all(p.device.type == "cpu" for p in self._parameters):
            differs = [not torch.equal(p, loaded) for p, loaded in pairs]
        else:  # one wait for the device, not one for each parameter
            flags = [(p != loaded).any() for p, loaded in pairs]
            differs = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        return tuple(i for i, different in enumerate(differs) if different)

    def before(self, indices: Sequence[int]) -> list[Tensor]:
        """What the given parameters were loaded with."""
        assert self._loaded is not None
        return [self._loaded[i] for i in indices]

    def accept(self, indices: Sequence[int]) -> None:
        """The server knows the given parameters' present values."""
        assert self._loaded is not None
        for i in indices:
            self._loaded[i] = self._parameters[i].detach().clone()  # never into the buffer: it may be the server's


def _alike(arrived: Tensor, parameter: Tensor) -> bool:
    return arrived.device == parameter.device and arrived.dtype == parameter.dtype
