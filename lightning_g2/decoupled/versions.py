"""Counts the updates of each layer, and how stale the gradients were that made them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_g2.decoupled.layer import Layout

_REMEMBERED = 256
"""Updates of a layer whose order is remembered; more than can fall into one layer's backward pass."""


@dataclass
class LayerStaleness:
    """Histograms over the updates of one layer, in versions of that layer.

    Attributes:
        age: updates by others since the forward pass read the layer: forward, queue and backward together.
        lag: of these, the ones since the backward pass began. Where layers are updated one by one, it counts until the
            pass reaches the layer: from there gradient and update are one. Where the whole is updated at once, it
            counts until then.
    """

    age: Counter[int] = field(default_factory=Counter)
    lag: Counter[int] = field(default_factory=Counter)


class Versions:
    """Versions of the layers. The weights themselves are under no lock; these integers are.

    Several runners over one module may share one of these.

    Args:
        layers: number of layers.
    """

    def __init__(self, layers: int) -> None:
        self._lock = threading.Lock()
        self._now = [0] * layers
        self._clock = 0
        self._recent = [deque[int](maxlen=_REMEMBERED) for _ in range(layers)]
        self.staleness = [LayerStaleness() for _ in range(layers)]
        self.mixed_reads = 0
        self.reads = 0

    @classmethod
    def of_module(cls, module: nn.Module) -> Versions:
        """For the layers of a module."""
        return cls(len(Layout.of(module).layers))

    def of(self, layer: int) -> int:
        """Updates of a layer so far."""
        return self._now[layer]

    def snapshot(self) -> list[int]:
        """Updates of each layer so far."""
        return list(self._now)

    @property
    def clock(self) -> int:
        """Updates of all layers so far."""
        return self._clock

    def note_read(self, reads: Sequence[int]) -> None:
        """A forward pass is over that has read these versions of the layers."""
        with self._lock:
            self.reads += 1
            self.mixed_reads += len(set(reads)) > 1

    def age(self, layer: int, read: int) -> int:
        """Updates of a layer since a version of it was read."""
        return self._now[layer] - read

    def advance(self, layer: int, *, read: int, start: int, reached: int | None) -> None:
        """A layer was updated.

        Args:
            layer: its index.
            read: its version in the forward pass.
            start: its version when the backward pass began.
            reached: the clock when the backward pass reached the layer; None: until now.
        """
        with self._lock:
            record = self.staleness[layer]
            record.age[self._now[layer] - read] += 1
            late = 0 if reached is None else sum(tick > reached for tick in self._recent[layer])
            record.lag[self._now[layer] - start - late] += 1
            self._tick(layer)

    def skip(self, layer: int) -> None:
        """A layer had no gradient where others had: it keeps step with them."""
        with self._lock:
            self._tick(layer)

    def _tick(self, layer: int) -> None:
        self._clock += 1
        self._now[layer] += 1
        self._recent[layer].append(self._clock)


def mean(histogram: Counter[int]) -> float:
    """Mean of a histogram; 0 of an empty one."""
    count = sum(histogram.values())
    return sum(value * n for value, n in histogram.items()) / count if count else 0.0
