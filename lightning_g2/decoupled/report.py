"""What a run of the threads was like."""

from __future__ import annotations

import threading
from collections import Counter

from lightning_g2.decoupled.ambient import free_threaded
from lightning_g2.decoupled.layer import Layout
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.scheduler import Pass
from lightning_g2.decoupled.versions import Versions, mean


class RunReport:
    """Counts and times of a run, readable while it goes on.

    Attributes:
        batches: batches that are through.
        skipped: those of them that had no loss.
        peak_graphs: most batches at once between the start of their forward and the end of their backward pass.
        free_threaded: the interpreter runs threads without a global lock.
    """

    def __init__(self, layout: Layout, options: DecoupledOptions, versions: Versions) -> None:
        self.batches = self.skipped = self.peak_graphs = 0
        self.free_threaded = free_threaded()
        self._layout, self._options, self._versions = layout, options, versions
        self._graphs = 0
        self._busy: dict[Pass, float] = {"forward": 0.0, "backward": 0.0}
        self._start = self._end = 0.0
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """From the start of the threads to the last end of their work; seconds."""
        return self._end - self._start

    @property
    def mixed_reads(self) -> float:
        """Share of the forward passes that read two or more versions, layer by layer."""
        return self._versions.mixed_reads / max(1, self._versions.reads)

    def utilisation(self, which: Pass) -> float:
        """Share of their time that the threads of a kind were in such passes, 0 to 1."""
        count = self._options.forward_threads if which == "forward" else self._options.backward_threads
        return self._busy[which] / max(1e-12, self.elapsed_s * (count or self._options.forward_threads))

    def ages(self) -> dict[str, Counter[int]]:
        """By layer, a histogram of the versions between reading and updating it: forward, queue and backward."""
        return {layer.name: self._versions.staleness[layer.index].age for layer in self._layout.layers}

    def lags(self) -> dict[str, Counter[int]]:
        """By layer, a histogram of what of that lies in the backward pass; see :class:`LayerStaleness`."""
        return {layer.name: self._versions.staleness[layer.index].lag for layer in self._layout.layers}

    @property
    def age_mean(self) -> float:
        """Mean age of all updates, versions of their layers."""
        return mean(sum(self.ages().values(), Counter()))

    @property
    def lag_mean(self) -> float:
        """Mean lag of all updates, versions of their layers."""
        return mean(sum(self.lags().values(), Counter()))

    def begin(self, now: float) -> None:
        """The threads start; a run that goes on keeps what it has counted."""
        self._start, self._end = now - self.elapsed_s, now

    def end(self, now: float) -> None:
        """All work is done for now."""
        self._end = now

    def busy(self, which: Pass, seconds: float) -> None:
        """A thread has made a pass."""
        with self._lock:
            self._busy[which] += seconds

    def graph_begins(self) -> None:
        """A forward pass begins."""
        with self._lock:
            self._graphs += 1
            self.peak_graphs = max(self.peak_graphs, self._graphs)

    def graph_ends(self, *, skipped: bool) -> None:
        """A batch is through."""
        with self._lock:
            self._graphs -= 1
            self.batches += 1
            self.skipped += skipped
