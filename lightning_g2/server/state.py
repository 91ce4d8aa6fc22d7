"""The server as a deterministic state machine: arrivals and time are passed in, there are no sockets and no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_g2.errors import ProtocolError
from lightning_g2.routing.mge import relative_age
from lightning_g2.server.layout import ParameterLayout
from lightning_g2.server.ledger import Ledger
from lightning_g2.server.optimizer import OptimizerSpec, set_hyper_parameters, to_cpu
from lightning_g2.server.telemetry import Telemetry
from lightning_g2.values import EpochCursor, PushPacket, PushReceipt, PushRecord, ServerView, WeightEdit

SCALE_DECAY = 0.9995
"""Decay per push of the running maximum of lr·|d_b|."""


@dataclass(frozen=True)
class ServerSetup:
    """What a server needs before the first push.

    Attributes:
        layout: the parameters it owns.
        weights: their values, one flat buffer of the layout.
        optimizers: the module's optimizers, in the module's order.
        ranks: number of ranks.
    """

    layout: ParameterLayout
    weights: Tensor
    optimizers: tuple[OptimizerSpec, ...]
    ranks: int


@dataclass(frozen=True)
class ServerSnapshot:
    """Weights and optimizer states of one version.

    Attributes:
        version: the version.
        weights: one flat buffer of the layout.
        states: per optimizer, its state by index in the layout.
        cursor: what of the epoch this version has not been trained on; None where ranks bring their own data.
    """

    version: int
    weights: Tensor
    states: tuple[dict[int, Any], ...]
    cursor: EpochCursor | None = None


class ServerState:
    """Master weights, the optimizers that move them, and the count of updates.

    Every method is a transition or a read; the host calls them one at a time.
    """

    def __init__(self, setup: ServerSetup) -> None:
        self.version = 0
        self._ranks = setup.ranks
        self._layout = setup.layout
        self._master = setup.weights.clone()
        self._parameters = [
            torch.nn.Parameter(view, requires_grad=view.is_floating_point() or view.is_complex())
            for view in setup.layout.views(self._master)
        ]
        self._optimizers = [spec.build(self._parameters) for spec in setup.optimizers]
        self._published: tuple[int, Tensor] | None = None
        self._window: dict[int, float] = {}
        self._scale: dict[str, float] = {}
        self._moved: set[int] = set()
        self._edited: dict[int, WeightEdit] = {}
        self._ledger = Ledger()
        self._telemetry = Telemetry()

    @property
    def size_bytes(self) -> int:
        """Bytes of one buffer with all weights."""
        return self._master.numel()

    def view(self) -> ServerView:
        """Version, window and scales, for a rank's next decision."""
        return ServerView(version=self.version, window=dict(self._window), scale=dict(self._scale))

    def push(self, packet: PushPacket, gradients: Tensor | None, *, time_s: float) -> PushReceipt:
        """Take in one push; a repeated packet is answered as before and changes nothing.

        Args:
            packet: the control part.
            gradients: flat buffer of the gradients of ``packet.present``; None for a rejected push.
            time_s: the host's clock, seconds.

        Raises:
            ProtocolError: unknown rank or optimizer, a gap in the sequence, a base version of the future, or a buffer
                of the wrong size.
        """
        self._check(packet, gradients)
        if (receipt := self._ledger.repeated(packet)) is not None:
            return receipt
        staleness = self.version - packet.base_version
        self._observe(packet)
        if not packet.rejected and gradients is not None:
            self._apply(packet, gradients)
        receipt = PushReceipt(version=self.version, staleness=staleness, applied=not packet.rejected)
        self._ledger.enter(packet, receipt)
        self._telemetry.add(
            PushRecord(
                rank=packet.rank,
                version=self.version,
                staleness=staleness,
                energy=packet.energy,
                weight=0.0 if packet.rejected else packet.weight,
                rejected=packet.rejected,
                samples=packet.samples,
                time_s=time_s,
            )
        )
        return receipt

    def edit(self, edit: WeightEdit, values: Tensor, before: Tensor) -> None:
        """Take in weights that a rank's own code has changed: clipped, reset, averaged or set to another model's.

        Where nothing came in between, or no gradient has ever moved the parameter, its changed elements are set;
        otherwise the change is added, so that no push of another rank is lost. Ranks that all change a parameter from
        one version, as they do after a sync point, all do the same: the first change counts.

        Args:
            edit: which parameters, and the version they were loaded at.
            values: their values, one flat buffer of the layout.
            before: the values they were loaded with, likewise.
        """
        views = (self._layout.views(values, edit.indices), self._layout.views(before, edit.indices))
        for index, value, loaded in zip(edit.indices, *views, strict=True):
            last = self._edited.get(index)
            if last is not None and last.base_version == edit.base_version and last.rank != edit.rank:
                continue
            self._edited[index] = edit
            parameter = self._parameters[index].data
            exact = edit.base_version == self.version or index not in self._moved
            target = value if exact else parameter + (value - loaded)
            parameter.copy_(torch.where(value != loaded, target, parameter))
        self._published = None

    def weights(self) -> tuple[int, Tensor]:
        """The current version and its weights; the buffer belongs to that version and never changes."""
        if self._published is None or self._published[0] != self.version:
            self._published = (self.version, self._master.clone())
        return self._published

    def copy_weights(self, buffer: Tensor) -> int:
        """Copy the current weights into a buffer of the layout and return their version."""
        buffer.copy_(self._master)
        return self.version

    def snapshot(self) -> ServerSnapshot:
        """Weights and optimizer states of one version, all copies."""
        index: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(self._parameters)}
        states = tuple({index[p]: to_cpu(s) for p, s in o.state.items()} for o in self._optimizers)
        return ServerSnapshot(version=self.version, weights=self._master.clone(), states=states)

    @property
    def telemetry(self) -> Telemetry:
        """The pushes taken in so far."""
        return self._telemetry

    def drop(self, rank: int) -> None:
        """Forget a rank that has left: its energy no longer counts in the window."""
        self._window.pop(rank, None)

    def _check(self, packet: PushPacket, gradients: Tensor | None) -> None:
        who = f"push {packet.sequence} of rank {packet.rank}"
        if not 0 <= packet.rank < self._ranks:
            raise ProtocolError(f"{who}: ranks are 0 to {self._ranks - 1}; the packet comes from another job")
        if not 0 <= packet.optimizer < len(self._optimizers):
            raise ProtocolError(f"{who}: optimizer {packet.optimizer} of {len(self._optimizers)}; none with this index")
        if packet.base_version > self.version:
            raise ProtocolError(f"{who}: base version {packet.base_version} lies after the current {self.version}")
        groups = len(self._optimizers[packet.optimizer].param_groups)
        if not packet.rejected and len(packet.groups) != groups:
            raise ProtocolError(
                f"{who}: {len(packet.groups)} parameter groups pushed, the server's optimizer has {groups}; groups "
                "cannot be added after training has started"
            )
        expected = 0 if packet.rejected else self._layout.size_bytes(packet.present)
        received = 0 if gradients is None else gradients.numel()
        if received != expected:
            raise ProtocolError(
                f"{who}: {received} bytes of gradients, expected {expected}; ranks disagree on the model"
            )

    def _observe(self, packet: PushPacket) -> None:
        for block, observed in packet.scale.items():
            self._scale[block] = max(SCALE_DECAY * self._scale.get(block, 0.0), observed)
        if not packet.rejected:
            self._window[packet.rank] = packet.energy * relative_age(
                packet.staleness, concurrency=self._ranks, pushes_per_version=1
            )

    def _apply(self, packet: PushPacket, gradients: Tensor) -> None:
        optimizer = self._optimizers[packet.optimizer]
        set_hyper_parameters(optimizer, packet.groups)
        self._moved.update(packet.present)
        pushed = [self._parameters[i] for i in packet.present]
        for parameter, gradient in zip(pushed, self._layout.views(gradients, packet.present), strict=True):
            parameter.grad = gradient
        try:
            optimizer.step()
        finally:
            for parameter in pushed:
                parameter.grad = None
        self.version += 1


def flatten(layout: ParameterLayout, tensors: Sequence[Tensor], indices: Sequence[int], buffer: Tensor) -> None:
    """Copy tensors, on any device, into a buffer of the layout."""
    views = layout.views(buffer, indices)
    if views:
        torch._foreach_copy_(views, list(tensors))
