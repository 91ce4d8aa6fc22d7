"""The threads: forward passes run ahead, backward passes follow and update each layer as they go."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from lightning_g2.decoupled.ambient import Ambient
from lightning_g2.decoupled.clone import ModuleClone, refuse_compiled
from lightning_g2.decoupled.correction import PipeMare
from lightning_g2.decoupled.graph import Gradients, Graph, Window, autograd_in_this_thread, loss_of, refuse_bypass
from lightning_g2.decoupled.layer import Layout
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.report import RunReport
from lightning_g2.decoupled.scheduler import Scheduler, ThreadScheduler
from lightning_g2.decoupled.stream import Streams, on
from lightning_g2.decoupled.update import Apply, GradientUpdate
from lightning_g2.decoupled.versions import Versions
from lightning_g2.errors import ConfigurationError

Loss = Callable[[Any, Any], Any]
"""Takes a module and a batch's data; returns a scalar, a dict with one under ``"loss"``, or None to skip the batch."""
AfterBatch = Callable[[int, "Tensor | None", bool], None]
"""Takes a batch's number, its loss (detached) and whether an update was completed with it."""


class DecoupledRunner:
    """Runs batches through forward and backward threads over one set of weights (PD-ASGD).

    A context manager: entering starts the threads; leaving waits until all batches are through, or, on an exception,
    drops those that no thread has begun; either way all threads have ended. An exception in a thread stops the others
    and is raised to the caller, from :meth:`submit`, :meth:`drain` or on leaving, as it was raised in its thread.

    Args:
        module: trained in place; on one device.
        loss: one batch's forward pass. It gets a thread's own copy of the module, see :class:`ModuleClone`.
        apply: takes the updates, from several threads at once.
        options: how many threads of which kind, and what they do.
        scheduler: who runs when; the operating system by default.
        backward: walks back from a loss; it gets the loss divided by ``accumulate``.
        after_batch: called after each batch, from one thread at a time: schedules are stepped here.

    Raises:
        ConfigurationError: the module has no parameters, or ones without a shape, or is compiled.

    Example::

        apply = LocalApply(optimizer, dict(module.named_parameters()), options)
        with DecoupledRunner(module, loss, apply, options) as runner:
            for batch in loader:
                runner.submit(batch)

    Source:
        arXiv 2410.05985.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        apply: Apply,
        options: DecoupledOptions | None = None,
        *,
        scheduler: Scheduler | None = None,
        backward: Callable[[Tensor], None] | None = None,
        after_batch: AfterBatch | None = None,
    ) -> None:
        self.options = options or DecoupledOptions()
        refuse_compiled(module)
        self._layout = Layout.of(module)
        self._loss, self._apply, self._after_batch = loss, apply, after_batch
        self._backward: Callable[[Tensor], Any] = backward or Tensor.backward
        self._scheduler = scheduler or ThreadScheduler()
        self._device = self._layout.parameters[0].device
        self._streams = Streams(self._device, self.options.graphs)
        self.versions = Versions(len(self._layout.layers))
        self._correction: PipeMare | None = None
        if self.options.correction == "pipemare":
            self._correction = PipeMare(self._layout.parameters, self._layout.layer_of, self.options.correction_steps)
        self._reading = threading.local()
        self._module = module
        self._clones: list[ModuleClone] = []
        self._inbox: deque[Graph] = deque()
        self._graphs: deque[Graph] = deque()
        self._window = Window(self.options.accumulate)
        self._window_filled = 0
        self._submitted = self._alive = 0
        self._sequences = [0] * max(self.options.backward_threads, self.options.forward_threads)
        self._closing = True
        self._before: list[Tensor | None] = []
        self._error: BaseException | None = None
        self._finishing = threading.Lock()
        self.report = RunReport(self._layout, self.options, self.versions)

    # --- the caller's side --------------------------------------------------------------------------------------------

    def __enter__(self) -> DecoupledRunner:
        options = self.options
        self._clones = [
            ModuleClone(self._module, self._layout, self._before_layer) for _ in range(options.forward_threads)
        ]
        self._before = [parameter.grad for parameter in self._layout.parameters]
        self._closing, self._alive = False, 0
        self._next_window()
        self.report.begin(self._scheduler.now())
        try:
            for lane in range(options.forward_threads):
                self._scheduler.start(f"forward-{lane}", partial(self._guard, self._forward_loop, lane))
            for lane in range(options.backward_threads):
                self._scheduler.start(f"backward-{lane}", partial(self._guard, self._backward_loop, lane))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self._stop()

    def submit(self, data: Any) -> None:
        """Hand in a batch; returns when there is room for another.

        Args:
            data: given to the loss.

        Raises:
            ConfigurationError: the threads do not run.
            BaseException: whatever a thread has raised.
        """
        if self._closing and self._error is None:
            raise ConfigurationError("submit() while no threads run: enter the runner first (with runner: ...)")
        if self._window_filled == self.options.accumulate:
            self._next_window()
        self._window_filled += 1
        graph = Graph(self._submitted, data, self._window, Ambient.here())
        graph.ready = self._streams.submit()
        with self._scheduler.changing():
            self._submitted += 1
            self._alive += 1
            self._inbox.append(graph)
        self._wait_until(lambda: self._alive < self.options.graphs)

    def drain(self) -> None:
        """Wait until all batches are through; an incomplete accumulation makes its update now.

        Raises:
            BaseException: whatever a thread has raised.
        """
        self._wait_until(lambda: self._alive == 0)
        if 0 < self._window_filled < self.options.accumulate and self._window.updates:
            self._flush()
        self._next_window()
        self.report.end(self._scheduler.now())

    def _flush(self) -> None:
        """Make the update of a window that no more batches will come to."""
        rest = self._window.rest()
        reads = dict(enumerate(self.versions.snapshot()))
        for layers in [[layer] for layer in rest] if self.options.update == "layer" else [list(rest)]:
            merged = {number: g for layer in layers for number, g in rest[layer].items()}
            self._update(layers, merged, {n: reads[n] for n in layers}, lane=0, batch=self._submitted - 1)
            for layer in layers:
                self.versions.skip(layer)
        if self._after_batch is not None:
            self._after_batch(self._submitted - 1, None, True)

    def _next_window(self) -> None:
        self._window, self._window_filled = Window(self.options.accumulate), 0

    def _wait_until(self, predicate: Callable[[], bool]) -> None:
        self._scheduler.wait_for(lambda: self._error is not None or predicate())
        if self._error is not None:
            self._stop()
            error, self._error = self._error, None
            raise error

    def _stop(self) -> None:
        """Have all threads end after what they are at, and wait for them."""
        with self._scheduler.changing():
            self._closing = True
            self._inbox.clear()
            self._graphs.clear()
        self._scheduler.join()
        self.report.end(self._scheduler.now())
        if self._clones:
            self._clones[0].give_back()
            self._clones = []

    # --- the threads' side --------------------------------------------------------------------------------------------

    def _guard(self, loop: Callable[[int], None], lane: int) -> None:
        try:
            loop(lane)
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"raised in {loop.__name__.strip('_').removesuffix('_loop')} thread {lane}")
            with self._scheduler.changing():
                self._error = self._error or error
                self._closing = True

    def _take(self, waiting: deque[Graph]) -> Graph | None:
        """The next batch of a queue; None when the thread is to end."""
        taken: list[Graph] = []

        def ready() -> bool:
            if not self._closing and waiting and not taken:
                taken.append(waiting.popleft())
            return bool(taken) or self._closing

        self._scheduler.wait_for(ready)
        return taken[0] if taken else None

    def _forward_loop(self, lane: int) -> None:
        clone = self._clones[lane]
        while (graph := self._take(self._inbox)) is not None:
            self.report.graph_begins()
            start = self._scheduler.now()
            graph.stream = self._streams.take(graph.ready)
            with graph.ambient.entered(), on(graph.stream):
                self._forward(clone, graph)
            self.report.busy("forward", self._scheduler.now() - start)
            if self.options.backward_threads:
                with self._scheduler.changing():
                    self._graphs.append(graph)
            else:
                self._walk_back(graph, lane)
            del graph

    def _forward(self, clone: ModuleClone, graph: Graph) -> None:
        graph.reads = self.versions.snapshot()
        graph.take_leaves(self._layout, self.options.weights)
        clone.refresh(graph.leaves)
        self._reading.graph = graph
        correction = self._correction
        with correction.saving(graph.leaves, self._gap_of(graph)) if correction is not None else nullcontext():
            loss = loss_of(self._loss(clone.module, graph.data))
        clone.settle()
        clone.place(self._layout.parameters)  # the leaves' memory is the graph's alone
        graph.loss = loss if loss is not None and loss.requires_grad else None
        self.versions.note_read(graph.reads)

    def _before_layer(self, layer: int) -> None:
        graph: Graph = self._reading.graph
        self._scheduler.spend("forward", layer)
        if self.options.weights == "current":
            graph.reads[layer] = self.versions.of(layer)

    def _gap_of(self, graph: Graph) -> Callable[[int], int]:
        return lambda layer: self.versions.age(layer, graph.reads[layer])

    def _backward_loop(self, lane: int) -> None:
        while (graph := self._take(self._graphs)) is not None:
            self._walk_back(graph, lane)
            del graph

    def _walk_back(self, graph: Graph, lane: int) -> None:
        start = self._scheduler.now()
        with graph.ambient.entered(), on(graph.stream), autograd_in_this_thread(self._device):
            self._walk(graph, lane)
        loss = None if graph.loss is None else graph.loss.detach()
        self._streams.give(graph.stream)
        self.report.busy("backward", self._scheduler.now() - start)
        self._finish(graph, loss)

    def _walk(self, graph: Graph, lane: int) -> None:
        graph.starts, graph.reached = self.versions.snapshot(), self.versions.clock
        whole: dict[int, Gradients] = {}
        if graph.loss is not None:
            graph.window.updates = True
            if self.options.update == "layer":
                graph.watch(self._layout, lambda layer, gradients: self._reach(graph, layer, gradients, lane))
            else:
                graph.watch(self._layout, lambda layer, gradients: self._keep(whole, layer, gradients))
            self._backward(graph.loss / self.options.accumulate if self.options.accumulate > 1 else graph.loss)
            if graph.sequence == 0:
                refuse_bypass(self._layout, self._before)
        rest = graph.rest(self._layout)
        if self.options.update == "block":
            self._deliver(graph, whole | rest, lane)
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
            self._update(list(complete), merged, reads, lane=lane, batch=graph.sequence)
        elif graph.loss is None:
            return
        reached = graph.reached if self.options.update == "layer" else None
        for layer, gradients in complete.items():
            if not gradients:
                self.versions.skip(layer)
                continue
            if self._correction is not None:
                gap = self.versions.age(layer, graph.reads[layer])
                self._correction.observe(layer, {number: before[number] for number in gradients}, gap)
            self.versions.advance(layer, read=graph.reads[layer], start=graph.starts[layer], reached=reached)

    def _update(self, layers: list[int], gradients: Gradients, reads: dict[int, int], *, lane: int, batch: int) -> None:
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
        )
        self._sequences[lane] += 1
        self._apply(update)

    def _finish(self, graph: Graph, loss: Tensor | None) -> None:
        with self._finishing:
            graph.window.finished += 1
            complete = graph.window.updates and graph.window.finished == graph.window.size
            if self._after_batch is not None:
                self._after_batch(graph.sequence, loss, complete)
        graph.free()
        self.report.graph_ends(skipped=loss is None)
        with self._scheduler.changing():
            self._alive -= 1
