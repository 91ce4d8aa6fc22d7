"""The two passes of a batch, whichever thread makes them, and the updates that come of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from lightning_g2.decoupled.clone import ModuleClone
from lightning_g2.decoupled.correction import PipeMare
from lightning_g2.decoupled.graph import Gradients, Graph, Window, loss_of, refuse_bypass
from lightning_g2.decoupled.layer import Layout
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.scheduler import Scheduler
from lightning_g2.decoupled.update import Apply, GradientUpdate
from lightning_g2.decoupled.versions import Versions
from lightning_g2.errors import ConfigurationError

Loss = Callable[[Any, Any], Any]
"""Takes a module and a batch's data; returns a scalar, a dict with one under ``"loss"``, or None to skip the batch."""


class Passes:
    """Forward and backward passes over one layout; safe to be called from several threads.

    Args:
        layout: the parameters.
        options: what the passes do.
        loss: one batch's forward pass.
        apply: takes the updates.
        scheduler: lets modelled time pass.
        backward: walks back from a loss.
        versions: counts updates.
    """

    def __init__(
        self,
        layout: Layout,
        options: DecoupledOptions,
        loss: Loss,
        apply: Apply,
        scheduler: Scheduler,
        backward: Callable[[Tensor], Any],
        versions: Versions,
    ) -> None:
        self.versions = versions
        self._layout, self._options, self._scheduler = layout, options, scheduler
        self._loss, self._apply, self._backward = loss, apply, backward
        self._correction: PipeMare | None = None
        if options.correction == "pipemare":
            self._correction = PipeMare(layout.parameters, layout.layer_of, options.correction_steps)
        self._block = None if options.own_block is None else layout.block(*options.own_block)
        self._reading = threading.local()
        self._before = [parameter.grad for parameter in layout.parameters]
        self._sequences = [0] * max(options.backward_threads, options.forward_threads)

    def forward(self, clone: ModuleClone, graph: Graph) -> None:
        """Build a batch's graph over leaves of its own."""
        graph.reads = self.versions.snapshot()
        after = graph.sequence - self._options.own_block_after
        graph.take_leaves(self._layout, self._options.weights, self._block if after >= 0 and after % 2 else None)
        clone.refresh(graph.leaves)
        self._reading.graph = graph
        correction = self._correction
        with correction.saving(graph.leaves, self._gap_of(graph)) if correction is not None else nullcontext():
            loss = loss_of(self._loss(clone.module, graph.data))
        self._reading.graph = None
        clone.settle()
        clone.place(self._layout.parameters)  # the leaves' memory is the graph's alone
        graph.loss = loss if loss is not None and loss.requires_grad else None
        self.versions.note_read(graph.reads)

    def before_layer(self, layer: int) -> None:
        """A layer is about to read its weights."""
        graph: Graph | None = getattr(self._reading, "graph", None)
        if graph is None:
            self._refuse_recomputation(layer)
            return
        self._scheduler.spend("forward", layer)
        if self._options.weights == "current":
            graph.reads[layer] = self.versions.of(layer)

    def _refuse_recomputation(self, layer: int) -> None:
        """A backward pass runs a layer forward again, on what weights and random state there are by then."""
        if self._options.graphs > 1:
            raise ConfigurationError(
                f"layer {self._layout.layers[layer].name!r}: activation checkpointing runs it again in the backward "
                "pass, where other batches have drawn from the random generator and changed the weights meanwhile; do "
                "without checkpointing, or set max_graphs=1"
            )

    def _gap_of(self, graph: Graph) -> Callable[[int], int]:
        return lambda layer: self.versions.age(layer, graph.reads[layer])

    def backward(self, graph: Graph, lane: int) -> None:
        """Walk a batch's graph back, and update what it completes."""
        graph.starts, graph.reached = self.versions.snapshot(), self.versions.clock
        whole: dict[int, Gradients] = {}
        if graph.loss is not None:
            graph.window.updates = True
            if self._options.update == "layer":
                graph.watch(self._layout, lambda layer, gradients: self._reach(graph, layer, gradients, lane))
            else:
                graph.watch(self._layout, lambda layer, gradients: self._keep(whole, layer, gradients))
            self._backward(graph.loss / self._options.accumulate if self._options.accumulate > 1 else graph.loss)
            if graph.sequence == 0:
                refuse_bypass(self._layout, self._before)
        rest = graph.rest(self._layout)
        if self._options.update == "block":
            self._deliver(graph, dict(sorted((whole | rest).items())), lane)
        else:
            for layer, gradients in rest.items():
                self._deliver(graph, {layer: gradients}, lane)

    def _keep(self, whole: dict[int, Gradients], layer: int, gradients: Gradients) -> None:
        self._scheduler.spend("backward", layer)
        whole[layer] = gradients

    def _reach(self, graph: Graph, layer: int, gradients: Gradients, lane: int) -> None:
        self._scheduler.spend("backward", layer)
        self._deliver(graph, {layer: gradients}, lane)
        graph.reached = self.versions.clock

    def _deliver(self, graph: Graph, layers: dict[int, Gradients], lane: int) -> None:
        """Add one batch's gradients of some layers to its window, and update those that are complete."""
        sums = {layer: graph.window.add(layer, gradients) for layer, gradients in layers.items()}
        complete = {layer: gradients for layer, gradients in sums.items() if gradients is not None}
        merged = {number: g for gradients in complete.values() for number, g in gradients.items()}
        before: Gradients = {}
        if merged:
            if self._correction is not None:
                before = {number: self._layout.parameters[number].data.clone() for number in merged}
            reads = {layer: graph.reads[layer] for layer in complete}
            self._update(list(complete), merged, reads, lane, graph.sequence, graph.window.stamp)
        elif graph.loss is None:
            return
        reached = graph.reached if self._options.update == "layer" else None
        for layer, gradients in complete.items():
            if not gradients:
                self.versions.skip(layer)
                continue
            if self._correction is not None:
                gap = self.versions.age(layer, graph.reads[layer])
                self._correction.observe(layer, {number: before[number] for number in gradients}, gap)
            self.versions.advance(layer, read=graph.reads[layer], start=graph.starts[layer], reached=reached)

    def _update(
        self, layers: list[int], gradients: Gradients, reads: dict[int, int], lane: int, batch: int, stamp: Any
    ) -> None:
        names = {layer: self._layout.layers[layer].name for layer in layers}
        ages = {layer: self.versions.age(layer, reads[layer]) for layer in layers}
        rates = {}
        if self._correction is not None:
            rates = {names[layer]: self._correction.rate(layer, ages[layer]) for layer in layers}
        update = GradientUpdate(
            layers=tuple(names.values()),
            gradients={self._layout.names[number]: gradients[number] for number in sorted(gradients)},
            base_versions={names[layer]: reads[layer] for layer in layers},
            ages={names[layer]: age for layer, age in ages.items()},
            rates=rates,
            lane=lane,
            sequence=self._sequences[lane],
            batch=batch,
            stamp=stamp,
        )
        self._sequences[lane] += 1
        self._apply(update)

    def flush(self, window: Window, batch: int) -> None:
        """Make the update of a window that no more batches will come to.

        Args:
            window: no thread is at it.
            batch: number of its last batch.
        """
        rest = window.rest()
        reads = dict(enumerate(self.versions.snapshot()))
        for layers in [[layer] for layer in rest] if self._options.update == "layer" else [list(rest)]:
            merged = {number: g for layer in layers for number, g in rest[layer].items()}
            self._update(layers, merged, {n: reads[n] for n in layers}, 0, batch, window.stamp)
            for layer in layers:
                self.versions.skip(layer)
