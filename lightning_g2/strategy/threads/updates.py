"""Where the threads' gradients go: to the module's own optimizer, or to the servers."""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from torch import Tensor

from lightning_g2.decoupled import DecoupledOptions, GradientUpdate, LocalApply, clip_
from lightning_g2.routing.reading import mean_of_decisions
from lightning_g2.server.telemetry import Telemetry
from lightning_g2.strategy.client import PushHead, RankClient
from lightning_g2.strategy.push_in_parts import PushInParts
from lightning_g2.strategy.router import PushRouter
from lightning_g2.strategy.threads.batch import BatchUnderWay, WindowUnderWay
from lightning_g2.values import PushRecord


class Updates(ABC):
    """Takes gradients from several threads at once."""

    def renew(self) -> None:  # noqa: B027 - there may be nothing to do
        """No window is under way: learn of parameters that the optimizer has been given since."""

    @abstractmethod
    def begin(self, batch: BatchUnderWay) -> WindowUnderWay:
        """The first forward pass of a window begins; its updates say what this returns."""

    @abstractmethod
    def apply(self, update: GradientUpdate) -> None:
        """Take the gradients of some layers; an :data:`~lightning_g2.decoupled.update.Apply`."""

    @abstractmethod
    def end(self, window: WindowUnderWay) -> None:
        """All batches of a window are through, and it has brought gradients."""


class OwnUpdates(Updates):
    """The module's optimizer steps right here, without a server, and without a lock on weights.

    Args:
        apply: steps.
        rank: this rank, for the records.

    Attributes:
        telemetry: a record for each window, as a server would keep it.
        version: windows that have been applied.
    """

    def __init__(self, apply: LocalApply, rank: int = 0) -> None:
        self.telemetry = Telemetry()
        self.version = 0
        self._apply = apply
        self._rank = rank
        self._lock = threading.Lock()
        apply.on_decision = lambda update, decision: update.stamp.decisions.append(decision)

    def begin(self, batch: BatchUnderWay) -> WindowUnderWay:
        """See :meth:`Updates.begin`."""
        return batch.window

    def apply(self, update: GradientUpdate) -> None:
        """See :meth:`Updates.apply`."""
        self._apply(update)
        update.stamp.ages.extend(update.ages.values())

    def end(self, window: WindowUnderWay) -> None:
        """See :meth:`Updates.end`."""
        energy, weight = mean_of_decisions(window.decisions)
        rejected = bool(window.decisions) and all(d.rejected for d in window.decisions)
        with self._lock:
            self.version += not rejected
            window.pushed = True
            self.telemetry.add(
                PushRecord(
                    rank=self._rank, version=self.version, staleness=max(window.ages, default=0), energy=energy,
                    weight=0.0 if rejected else weight, rejected=rejected, samples=window.samples,
                    time_s=time.monotonic(),
                )
            )  # fmt: skip


class PushedUpdates(Updates):
    """Each layer's gradients go through the gate and to the server as soon as they exist; its new weights come back.

    The packets of one window are one push, in a lane of its own: several windows are under way at once. The last packet
    brings all weights. One packet of this rank is under way at a time; threads wait for each other here, and nowhere
    else.

    Args:
        client: this rank's end of the protocol.
        router: asks the gate.
        options: how gradients are clipped.
        step: optimizer steps so far.
    """

    def __init__(
        self, client: RankClient, router: PushRouter, options: DecoupledOptions, step: Callable[[], int]
    ) -> None:
        self._client, self._router, self._options, self._step = client, router, options, step
        self._lock = threading.Lock()
        self._lanes = list(range(2 * options.graphs))  # a heap
        self._index_of: dict[str, int] = {}
        self._expected: set[int] = set()

    def restart(self) -> None:
        """A training begins, or the optimizers' groups have changed; no window is under way."""
        specs = self._client.layout.specs
        self._index_of = {specs[i].name: i for i in self._client.indices(0)}
        self._expected = set()

    def renew(self) -> None:
        """See :meth:`Updates.renew`; the server must have them before their gradients come."""
        if self._client.regrouped:
            self._client.renew()
            self.restart()

    def begin(self, batch: BatchUnderWay) -> WindowUnderWay:
        """See :meth:`Updates.begin`."""
        batch.window.base = self._client.base_version
        return batch.window

    def apply(self, update: GradientUpdate) -> None:
        """See :meth:`Updates.apply`."""
        clip_(update.gradients, self._options)
        window: WindowUnderWay = update.stamp
        index_of = self._index_of
        gradients = {index_of[name]: g for name, g in update.gradients.items() if name in index_of}
        if not gradients:
            return  # of parameters that no optimizer has
        with self._lock:
            if window.push is None:
                window.push = self._opened(window)
            window.arrived |= gradients.keys()
            factor = next(iter(update.rates.values()), 1.0)
            if self._expected and window.arrived >= self._expected:  # there is nothing left to overlap it with
                self._send_held(window)
                window.held, window.held_factor = gradients, factor
            else:
                self._send(window.push, gradients, factor)

    def end(self, window: WindowUnderWay) -> None:
        """See :meth:`Updates.end`."""
        with self._lock:
            push = window.push
            if push is None:
                return
            client = self._client
            client.send_edits([i for i in range(len(client.layout)) if i not in push.dealt_with])
            push.close(window.held, samples=window.samples, lr_factor=window.held_factor)
            client.finish()
            self._expected = set(window.arrived)
            window.held, window.push, window.pushed = {}, None, True
            heapq.heappush(self._lanes, window.lane)

    def _opened(self, window: WindowUnderWay) -> PushInParts:
        window.lane = heapq.heappop(self._lanes)
        view = self._client.view(window.base, needs_view=self._router.gate.needs_view)
        head = PushHead(0, window.base, view, window.samples, lane=window.lane, window=window.number)
        return PushInParts(self._client, head, lambda: partial(self._router.route, 0, self._step()))

    def _send_held(self, window: WindowUnderWay) -> None:
        """A window has more parameters than the one before: what was taken for its end goes now."""
        held, window.held = window.held, {}
        if held and window.push is not None:
            self._send(window.push, held, window.held_factor)

    def _send(self, push: PushInParts, gradients: dict[int, Tensor], factor: float) -> None:
        client = self._client
        client.send_edits(gradients)
        fresh = client.transport.shares_memory
        if push.send(gradients, fresh=fresh, lr_factor=factor) and (weights := client.await_replies()) is not None:
            client.load_some(weights, tuple(gradients))
