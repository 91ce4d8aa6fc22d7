"""The threads: forward passes run ahead, backward passes follow and update each layer as they go."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from lightning_g2.decoupled.ambient import Ambient
from lightning_g2.decoupled.clone import ModuleClone, refuse_compiled
from lightning_g2.decoupled.graph import Graph, Window, autograd_in_this_thread
from lightning_g2.decoupled.layer import Layout
from lightning_g2.decoupled.options import DecoupledOptions
from lightning_g2.decoupled.passes import Loss, Passes
from lightning_g2.decoupled.report import RunReport
from lightning_g2.decoupled.scheduler import Scheduler, ThreadScheduler
from lightning_g2.decoupled.stream import Streams, on
from lightning_g2.decoupled.update import Apply
from lightning_g2.decoupled.versions import Versions
from lightning_g2.errors import ConfigurationError

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
        versions: counts updates; to be shared where several runners train one module.
        stamp: asked as the first forward pass of a window begins, with its batch; its updates say what it said.
        window_end: called with that when all batches of a window are through and have brought gradients.
        shared: classes of modules that all threads use as they are, without a copy: ones that hold no parameters and
            keep what they learn in attributes, such as metrics.

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
        versions: Versions | None = None,
        stamp: Callable[[Any], Any] | None = None,
        window_end: Callable[[Any], None] | None = None,
        shared: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self.options = options or DecoupledOptions()
        refuse_compiled(module)
        self._layout = Layout.of(module)
        self._scheduler = scheduler or ThreadScheduler()
        self._passes = Passes(
            self._layout,
            self.options,
            loss,
            apply,
            self._scheduler,
            backward or Tensor.backward,
            versions or Versions(len(self._layout.layers)),
        )
        self._after_batch, self._stamp, self._shared = after_batch, stamp, shared
        self._window_end = window_end
        self._device = self._layout.parameters[0].device
        self._streams = Streams(self._device, self.options.graphs)
        self._module = module
        self._clones: list[ModuleClone] = []
        self._inbox: deque[Graph] = deque()
        self._graphs: deque[Graph] = deque()
        self._window = Window(self.options.accumulate)
        self._submitted = self._alive = 0
        self._closing = True
        self._error: BaseException | None = None
        self._finishing = threading.Lock()
        self.report = RunReport(self._layout, self.options, self._passes.versions)

    # --- the caller's side --------------------------------------------------------------------------------------------

    def __enter__(self) -> DecoupledRunner:
        options = self.options
        self._clones = [
            ModuleClone(self._module, self._layout, self._passes.before_layer, self._shared)
            for _ in range(options.forward_threads)
        ]
        self._closing, self._alive, self._error = False, 0, None
        self.next_window()
        self.report.begin(self._scheduler.now())
        try:
            for lane in range(options.forward_threads):
                self._scheduler.start(f"forward-{lane}", partial(self._guard, self._forward_loop, lane))
            for lane in range(options.backward_threads):
                self._scheduler.start(f"backward-{lane}", partial(self._guard, self._backward_loop, lane))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self.stop()

    def submit(self, data: Any) -> None:
        """Hand in a batch; returns when there is room for another.

        Args:
            data: given to the loss.

        Raises:
            ConfigurationError: the threads do not run.
            BaseException: whatever a thread has raised.
        """
        self.begin(data)
        self.wait_for(lambda: self.room)

    def begin(self, data: Any) -> None:
        """Hand in a batch, whether there is :attr:`room` or not; returns at once."""
        if self._closing and self._error is None:
            raise ConfigurationError("submit() while no threads run: enter the runner first (with runner: ...)")
        if self._window.begun == self._window.size:
            self.next_window()
        self._window.begun += 1
        graph = Graph(self._submitted, data, self._window, Ambient.here())
        graph.ready = self._streams.submit()
        with self._scheduler.changing():
            self._submitted += 1
            self._alive += 1
            self._inbox.append(graph)

    @property
    def room(self) -> bool:
        """Whether another batch may be under way."""
        return self._alive < self.options.graphs

    @property
    def idle(self) -> bool:
        """Whether no batch is under way."""
        return self._alive == 0

    @property
    def running(self) -> bool:
        """Whether the threads run."""
        return bool(self._clones)

    def drain(self) -> None:
        """Wait until all batches are through; an incomplete accumulation makes its update now.

        Raises:
            BaseException: whatever a thread has raised.
        """
        self.wait_for(lambda: self.idle)
        window = self._window
        if 0 < window.begun < window.size and window.updates:
            self._passes.flush(window, self._submitted - 1)
            if self._window_end is not None:
                self._window_end(window.stamp)
            if self._after_batch is not None:
                self._after_batch(self._submitted - 1, None, True)
        self.next_window()
        self.report.end(self._scheduler.now())

    def next_window(self, size: int | None = None) -> None:
        """The batches that come now make an update together.

        Args:
            size: how many; None: ``accumulate``. Their losses are divided by ``accumulate`` all the same.
        """
        self._window = Window(self.options.accumulate if size is None else size)

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that the threads bring about.

        Raises:
            BaseException: whatever a thread has raised.
        """
        self._scheduler.wait_for(lambda: self._error is not None or predicate())
        if self._error is not None:
            self.stop()
            error, self._error = self._error, None
            raise error

    def stop(self) -> None:
        """Have all threads end after what they are at, and wait for them; any number of calls."""
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
            if self._stamp is not None:
                graph.window.stamp_by(partial(self._stamp, graph.data))
            with graph.ambient.entered(), on(graph.stream):
                self._passes.forward(clone, graph)
            self.report.busy("forward", self._scheduler.now() - start)
            if self.options.backward_threads:
                with self._scheduler.changing():
                    self._graphs.append(graph)
            else:
                self._walk_back(graph, lane)
            del graph

    def _backward_loop(self, lane: int) -> None:
        while (graph := self._take(self._graphs)) is not None:
            self._walk_back(graph, lane)
            del graph

    def _walk_back(self, graph: Graph, lane: int) -> None:
        start = self._scheduler.now()
        with graph.ambient.entered(), on(graph.stream), autograd_in_this_thread(self._device):
            self._passes.backward(graph, lane)
        loss = None if graph.loss is None else graph.loss.detach()
        self._streams.give(graph.stream)
        self.report.busy("backward", self._scheduler.now() - start)
        self._finish(graph, loss)

    def _finish(self, graph: Graph, loss: Tensor | None) -> None:
        with self._finishing:
            graph.window.finished += 1
            complete = graph.window.updates and graph.window.finished == graph.window.size
            if complete and self._window_end is not None:
                self._window_end(graph.window.stamp)
            graph.free()
            self.report.graph_ends(skipped=loss is None)
            self.report.end(self._scheduler.now())
            if self._after_batch is not None:
                self._after_batch(graph.sequence, loss, complete)
        with self._scheduler.changing():
            self._alive -= 1
