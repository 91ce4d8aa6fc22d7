"""The server as a deterministic state machine: arrivals and time are passed in, there are no sockets and no threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_g2.errors import ProtocolError
from lightning_g2.routing.mge import relative_age
from lightning_g2.server.layout import ParameterLayout, read_gradients
from lightning_g2.server.ledger import Ledger
from lightning_g2.server.master import MasterWeights
from lightning_g2.server.optimizer import MASTER_KEY, OptimizerParts, OptimizerSpec, inner_optimizers, pack_parts
from lightning_g2.server.parcel import Parcel, unpack
from lightning_g2.server.served import ServedOptimizer
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
        master_dtype: dtype in which half-precision parameters are kept and stepped; None keeps the module's.
        masters: such masters by index, from a checkpoint.
        weight_by_samples: a push counts by its samples over the mean of all pushes so far.
    """

    layout: ParameterLayout
    weights: Tensor
    optimizers: tuple[OptimizerSpec, ...]
    ranks: int
    master_dtype: torch.dtype | None = None
    masters: Mapping[int, Tensor] = field(default_factory=dict)
    weight_by_samples: bool = False


@dataclass(frozen=True)
class ServerSnapshot:
    """Weights and optimizers of one version.

    Attributes:
        version: the version.
        layout: the parameters.
        weights: one flat buffer of the layout.
        optimizers: per optimizer, what it keeps.
        evolved: per optimizer and group, the hyper-parameters that the optimizer itself has changed.
        cursor: what of the epoch this version has not been trained on; None where ranks bring their own data.
        steps: optimizer steps of the whole job since the start of the fit.
    """

    version: int
    layout: ParameterLayout
    weights: Tensor
    optimizers: tuple[Parcel, ...]
    evolved: tuple[list[dict[str, Any]], ...]
    cursor: EpochCursor | None = None
    steps: int = 0

    def parts(self, parameters: Sequence[Any]) -> list[OptimizerParts]:
        """What the optimizers keep, their state by parameter.

        Args:
            parameters: what stands for each parameter of the layout.
        """
        return [unpack(parcel, parameters) for parcel in self.optimizers]

    @property
    def states(self) -> tuple[dict[int, Any], ...]:
        """Per optimizer, its state by index in the layout."""
        return tuple(dict(parts.state) for parts in self.parts(range(len(self.layout))))


class ServerState:
    """Master weights, the optimizers that move them, and the count of updates.

    Every method is a transition or a read; the host calls them one at a time.
    """

    def __init__(self, setup: ServerSetup) -> None:
        self.version = 0
        self._ranks = setup.ranks
        self._weights = MasterWeights(
            setup.layout, setup.weights, master_dtype=setup.master_dtype, masters=setup.masters
        )
        self._served = [ServedOptimizer(spec, self._weights.parameters) for spec in setup.optimizers]
        self._published: tuple[int, Tensor] | None = None
        self._window: dict[int, float] = {}
        self._scale: dict[str, float] = {}
        self._weight_by_samples = setup.weight_by_samples
        self._sizes = (0, 0)  # pushes applied, samples behind them
        self._moved: set[int] = set()
        self._edited: dict[int, WeightEdit] = {}
        self._ledger = Ledger()
        self._telemetry = Telemetry()

    @property
    def size_bytes(self) -> int:
        """Bytes of one buffer with all weights."""
        return self._weights.buffer.numel()

    @property
    def layout(self) -> ParameterLayout:
        """The parameters it owns."""
        return self._weights.layout

    def adopt(self, layout: ParameterLayout, values: Tensor) -> ParameterLayout:
        """Take more parameters over; the first rank that brings one gives its value, see :class:`MasterWeights`."""
        grown = self._weights.adopt(layout, values)
        if self._published is not None and self._published[1].numel() != self.size_bytes:
            self._published = None
        return grown

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
        views = (self.layout.views(values, edit.indices), self.layout.views(before, edit.indices))
        for index, value, loaded in zip(edit.indices, *views, strict=True):
            last = self._edited.get(index)
            if last is not None and last.base_version == edit.base_version and last.rank != edit.rank:
                continue
            self._edited[index] = edit
            parameter = self._weights.parameters[index].data
            exact = edit.base_version == self.version or index not in self._moved
            target = value.to(parameter.dtype) if exact else parameter + (value - loaded)
            parameter.copy_(torch.where(value != loaded, target, parameter))
        self._weights.publish()
        self._published = None

    def weights(self) -> tuple[int, Tensor]:
        """The current version and its weights; the buffer belongs to that version and never changes."""
        if self._published is None or self._published[0] != self.version:
            self._published = (self.version, self._weights.buffer.clone())
        return self._published

    def copy_weights(self, buffer: Tensor) -> int:
        """Copy the current weights into a buffer and return their version.

        Args:
            buffer: takes what fits: a rank that does not know the newest parameters reads the beginning.
        """
        size = min(buffer.numel(), self.size_bytes)
        buffer[:size].copy_(self._weights.buffer[:size])
        return self.version

    def snapshot(self) -> ServerSnapshot:
        """Weights and optimizers of one version, all copies."""
        index = {id(parameter): i for i, parameter in enumerate(self._weights.parameters)}
        return ServerSnapshot(
            version=self.version,
            layout=self.layout,
            weights=self._weights.buffer.clone(),
            optimizers=tuple(self._packed(served, index) for served in self._served),
            evolved=tuple(served.evolved() for served in self._served),
        )

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
        if not 0 <= packet.optimizer < len(self._served):
            raise ProtocolError(f"{who}: optimizer {packet.optimizer} of {len(self._served)}; none with this index")
        if packet.base_version > self.version:
            raise ProtocolError(f"{who}: base version {packet.base_version} lies after the current {self.version}")
        layout = self.layout
        if any(not 0 <= i < len(layout) for i in (*packet.present, *(i for m in packet.members for i in m))):
            raise ProtocolError(
                f"{who}: names parameters beyond the {len(layout)} that the server has; a rank must hand new "
                "parameters over before it pushes their gradients"
            )
        served = self._served[packet.optimizer]
        groups = len(packet.members or served.optimizer.param_groups)
        if not packet.rejected and len(packet.groups) != groups:
            raise ProtocolError(
                f"{who}: {len(packet.groups)} parameter groups pushed, members of {groups} are known; every group "
                "travels with its hyper-parameters"
            )
        if packet.inner and packet.inner not in inner_optimizers(served.optimizer):
            raise ProtocolError(f"{who}: optimizer {served.name} has no optimizer in its attribute {packet.inner!r}")
        wire = layout.of_gradients(packet.present, packet.sparse) if packet.sparse else layout
        expected = 0 if packet.rejected else wire.size_bytes(None if packet.sparse else packet.present)
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
        served = self._served[packet.optimizer]
        served.regroup(packet.members, packet.groups)
        served.set_hyper_parameters(packet.rank, packet.groups)
        self._moved.update(packet.present)
        pushed = [self._weights.parameters[i] for i in packet.present]
        tensors = read_gradients(self.layout, packet.present, packet.sparse, gradients)
        if self._weight_by_samples:
            self._weigh(tensors, packet.samples)
        served.step(packet.inner, pushed, tensors)
        self._weights.publish()
        self.version += 1

    def _weigh(self, tensors: Sequence[Tensor], samples: int) -> None:
        """Ranks may have batches of other sizes: scale gradients, in place, so that every sample counts alike."""
        pushes, all_samples = self._sizes[0] + 1, self._sizes[1] + samples
        self._sizes = (pushes, all_samples)
        if samples * pushes != all_samples:  # equal batches stay as they are, to the last bit
            torch._foreach_mul_(list(tensors), samples * pushes / all_samples)

    def _packed(self, served: ServedOptimizer, index: Mapping[int, int]) -> Parcel:
        """What an optimizer keeps; the masters of its parameters travel in their states."""
        state, masters = served.optimizer.state, self._weights.masters()
        weights = self.layout.views(self._weights.buffer)
        mine: dict[int, torch.nn.Parameter] = {}
        for parameter in (p for group in served.optimizer.param_groups for p in group["params"]):
            i = index[id(parameter)]
            # One that was never stepped is its weight, and gets no state that it would not have otherwise.
            if i in masters and (parameter in state or not torch.equal(masters[i], weights[i].to(masters[i].dtype))):
                mine[i] = parameter
        absent = [p for p in mine.values() if p not in state]
        for i, parameter in mine.items():
            state[parameter][MASTER_KEY] = masters[i]
        try:
            return pack_parts(served.optimizer, index)
        finally:
            for parameter in mine.values():
                del state[parameter][MASTER_KEY]
            for parameter in absent:
                del state[parameter]
