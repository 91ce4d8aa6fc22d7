"""The server as a deterministic state machine: arrivals and time are passed in, there are no sockets and no threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_g2.errors import DroppedError, ProtocolError
from lightning_g2.routing.mge import relative_age
from lightning_g2.server.aggregate import ASYNCHRONOUS, Aggregation, Arrival, GradientMean, PushBuffer
from lightning_g2.server.cadence import Cadence
from lightning_g2.server.layout import ParameterLayout, read_gradients
from lightning_g2.server.ledger import Ledger
from lightning_g2.server.master import MasterWeights
from lightning_g2.server.optimizer import MASTER_KEY, OptimizerParts, OptimizerSpec, inner_optimizers, pack_parts
from lightning_g2.server.parcel import Parcel, unpack
from lightning_g2.server.parts import OpenPush, OpenPushes
from lightning_g2.server.served import ServedOptimizer
from lightning_g2.server.telemetry import Telemetry
from lightning_g2.server.wire import widened
from lightning_g2.values import (
    EpochCursor,
    PushKey,
    PushPacket,
    PushReceipt,
    PushRecord,
    RoundsChoice,
    ServerView,
    WeightEdit,
)

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
        weight_by_samples: a push counts by its samples a step over the mean of all pushes so far.
        aggregation: how many pushes make one version.
        cadence: where that is chosen by itself, what an earlier training has kept of it.
        record: file to write each push to; None for none.
        device: where the server keeps weights and moments, and steps; what comes and goes lies on the CPU.
        lanes: windows of a rank that are under way at once; pushes are as old as the ranks times these make them.
        by_tensor: weights handed out after a push may be of several versions, each tensor of one.
    """

    layout: ParameterLayout
    weights: Tensor
    optimizers: tuple[OptimizerSpec, ...]
    ranks: int
    master_dtype: torch.dtype | None = None
    masters: Mapping[int, Tensor] = field(default_factory=dict)
    weight_by_samples: bool = False
    aggregation: Aggregation = ASYNCHRONOUS
    cadence: Mapping[str, Any] | None = None
    record: str | None = None
    device: str = "cpu"
    by_tensor: bool = False
    lanes: int = 1


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
        buffered: pushes behind those steps that wait for others, and are not in the weights yet.
        cadence: where the size of rounds is chosen by itself, what is known for that.
    """

    version: int
    layout: ParameterLayout
    weights: Tensor
    optimizers: tuple[Parcel, ...]
    evolved: tuple[list[dict[str, Any]], ...]
    cursor: EpochCursor | None = None
    steps: int = 0
    buffered: int = 0
    cadence: Mapping[str, Any] | None = None

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

    Every method is a transition or a read; the host calls them one at a time. How many pushes make one version, says
    :class:`~lightning_g2.server.aggregate.Aggregation`. Pushes that :meth:`push` could not answer for good come out of
    :meth:`settled` once they have been applied.
    """

    def __init__(self, setup: ServerSetup) -> None:
        self.version = 0
        self._ranks = setup.ranks
        self._leases = dict.fromkeys(range(setup.ranks), 0)  # of live ranks
        self._lanes = setup.lanes
        self._aggregation = how = setup.aggregation
        self._cadence: Cadence | None = None
        if how.auto is not None:
            self._cadence = Cadence(how.auto, aggregate=how.aggregate, late=how.late, kept=setup.cadence)
            rounds = self._cadence.first(setup.ranks) if setup.cadence is None else setup.cadence["rounds"]
            self._aggregation = replace(how, rounds=rounds)
        self._rounds_since = 0  # gradients of versions before cannot be late: there were no rounds
        self._choice: RoundsChoice | None = None
        self._device = torch.device(setup.device)
        self._weights = MasterWeights(
            setup.layout,
            setup.weights,
            device=self._device,
            master_dtype=setup.master_dtype,
            masters=setup.masters,
        )
        self._served = [ServedOptimizer(spec, self._weights.parameters) for spec in setup.optimizers]
        self._published: tuple[int, Tensor] | None = None
        self._window: dict[int, float] = {}
        self._scale: dict[str, float] = {}
        self._weight_by_samples = setup.weight_by_samples
        self._buffers: dict[tuple[int, str], PushBuffer] = {}  # by optimizer, and the one within it that steps
        self._settled: dict[PushKey, PushReceipt] = {}
        self._moved: set[int] = set()
        self._edited: dict[int, WeightEdit] = {}
        self._ledger = Ledger()
        self._open = OpenPushes()
        self._telemetry = Telemetry()
        self._arrivals = 0

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

    @property
    def pushes_per_version(self) -> int:
        """K, pushes whose mean makes one version: never more than there are live ranks."""
        return max(1, min(self._aggregation.pushes, len(self._leases)))

    @property
    def rounds(self) -> int:
        """Pushes that end the synchronous rounds in force; 0 where no rank waits."""
        return 0 if self._aggregation.rounds is None else self.pushes_per_version

    def view(self) -> ServerView:
        """Version, window and scales, for a rank's next decision."""
        return ServerView(
            self.version,
            dict(self._window),
            dict(self._scale),
            self.pushes_per_version,
            self._arrivals,
            self._choice,
            ranks=len(self._leases),
        )

    def begin(self, rank: int, *, time_s: float) -> None:
        """A rank begins to compute now, and not when its last push was answered."""
        if self._cadence is not None:
            self._cadence.begin(rank, time_s)

    def pause(self, rank: int) -> None:
        """A rank computes nothing until it begins anew."""
        if self._cadence is not None:
            self._cadence.pause(rank)

    def knows(self, packet: PushPacket) -> bool:
        """Whether this very packet has been taken in before."""
        return self._ledger.repeated(packet) is not None

    def push(self, packet: PushPacket, gradients: Tensor | None, *, time_s: float) -> PushReceipt:
        """Take in one packet of a push; a repeated one is answered as before and changes nothing.

        Gradients of packets before the last are applied as they come; with the last one the version moves on, and the
        push is counted.

        Args:
            packet: the control part.
            gradients: flat buffer of the gradients of ``packet.present``; None for a rejected packet. Read before this
                returns, never later.
            time_s: the host's clock, seconds.

        Returns:
            What became of it. Where it ``waits``, its rank is to be answered when :meth:`settled` names it.

        Raises:
            DroppedError: the rank has left or was dropped since it was given the packet's lease.
            ProtocolError: unknown rank or optimizer, a gap in the sequence, a base version of the future, or a buffer
                of the wrong size.
        """
        self._check(packet, gradients)
        if (receipt := self._ledger.repeated(packet)) is not None:
            return receipt
        self._arrivals += 1
        staleness = self.version - packet.base_version
        push = self._open.take(packet)
        if not packet.last:
            return self._apply_part(packet, gradients, push)
        before, rounds = self.version, self._aggregation.rounds is not None
        buffer = self._buffer(packet)
        late = rounds and self._rounds_since <= packet.base_version < buffer.version
        dropped = late and not packet.rejected and self._aggregation.late == "drop"
        self._observe(packet, counts=not (packet.rejected or dropped))
        buffered, waits = not (packet.rejected or dropped), rounds and not late
        if self._cadence is not None:
            self._cadence.arrive(packet.rank, time_s)
            if not waits:
                self._cadence.begin(packet.rank, time_s)
        if buffered or waits or not rounds:  # a late push without gradient is no arrival
            self._join(buffer, Arrival(packet, push, waits), gradients, time_s)
        if self.version > before:
            self._reconsider(time_s)
        if packet.rejected and push.applied:
            self.version += 1
        receipt = self._settled.pop(packet.key, None) or PushReceipt(
            version=self.version, staleness=staleness, applied=False, buffered=buffered, late=dropped, waits=waits
        )
        self._ledger.enter(packet, receipt)
        if not buffered:
            self._record(packet, push, staleness, time_s, late=dropped)
        return receipt

    def flush(self, *, time_s: float) -> None:
        """Apply what has arrived for the next version, however few pushes that are: at sync points."""
        self._apply_all(time_s)
        if self._cadence is not None:
            for rank in self._leases:
                self._cadence.pause(rank)
            self._reconsider(time_s, meeting=True)

    def close_rounds(self, idle: Collection[int], *, time_s: float) -> None:
        """End the rounds, if no further push can join them.

        Args:
            idle: live ranks that will not push before others have moved: they wait for a window, or at a sync point.
                Those that wait for a round are known.
            time_s: the host's clock, seconds.
        """
        if self._aggregation.rounds is not None and self._leases.keys() <= {*idle, *self._waiting()}:
            self._apply_all(time_s)

    def settled(self) -> dict[PushKey, PushReceipt]:
        """Receipts of buffered and waiting pushes whose version has come since the last call, in order of arrival."""
        settled, self._settled = self._settled, {}
        return settled

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
        views = (self.layout.views(buffer.to(self._device), edit.indices) for buffer in (values, before))
        for index, value, loaded in zip(edit.indices, *views, strict=True):
            last = self._edited.get(index)
            if last is not None and last.base_version == edit.base_version and last.rank != edit.rank:
                continue
            self._edited[index] = edit
            parameter = self._weights.parameters[index].data
            exact = edit.base_version == self.version or index not in self._moved
            target = value.to(parameter.dtype) if exact else parameter + (value - loaded)
            parameter.copy_(torch.where(value != loaded, target, parameter))
        self._weights.publish(edit.indices)
        self._published = None

    def weights(self) -> tuple[int, Tensor]:
        """The current version and its weights; the buffer belongs to that version and never changes."""
        if self._published is None or self._published[0] != self.version:
            self._published = (self.version, self._weights.buffer.to("cpu", copy=True))
        return self._published

    def copy_weights(self, buffer: Tensor) -> int:
        """Copy the current weights into a buffer and return their version.

        Args:
            buffer: takes what fits: a rank that does not know the newest parameters reads the beginning.
        """
        size = min(buffer.numel(), self.size_bytes)
        buffer[:size].copy_(self._weights.buffer[:size])
        return self.version

    def copy_span(self, buffer: Tensor, start: int, stop: int) -> None:
        """Copy some bytes of the weights into a buffer of the layout."""
        buffer[start:stop].copy_(self._weights.buffer[start:stop])

    def snapshot(self) -> ServerSnapshot:
        """Weights and optimizers of one version, all copies."""
        index = {id(parameter): i for i, parameter in enumerate(self._weights.parameters)}
        return ServerSnapshot(
            version=self.version,
            layout=self.layout,
            weights=self._weights.buffer.to("cpu", copy=True),
            optimizers=tuple(self._packed(served, index) for served in self._served),
            evolved=tuple(served.evolved() for served in self._served),
            buffered=sum(buffer.mean.pushes for buffer in self._buffers.values()),
            cadence=(
                None if self._cadence is None else {"rounds": self._aggregation.rounds, **self._cadence.state_dict()}
            ),
        )

    @property
    def telemetry(self) -> Telemetry:
        """The pushes taken in so far."""
        return self._telemetry

    def drop(self, rank: int, *, time_s: float) -> bool:
        """Forget a rank that has left or died: the window is without its energy, and buffers wait for it no longer.

        What it has sent before still counts; whatever comes under its lease from now on is refused.

        Returns:
            Whether a part of a push has been applied whose end has not come.
        """
        self._window.pop(rank, None)
        if partly := self._open.drop(rank):
            self.version += 1
        if self._leases.pop(rank, None) is None:
            return partly
        for key, buffer in self._buffers.items():
            if self._aggregation.rounds is None or buffer.count >= self.pushes_per_version:
                self._apply(key, buffer, time_s)
        if self._cadence is not None:
            self._cadence.leave(rank)
            if self._choice is not None and self._leases:
                self._choose(time_s)
        return partly

    def _check(self, packet: PushPacket, gradients: Tensor | None) -> None:
        who = f"push {packet.sequence} of rank {packet.rank}"
        if not 0 <= packet.rank < self._ranks:
            raise ProtocolError(f"{who}: ranks are 0 to {self._ranks - 1}; the packet comes from another job")
        if self._leases.get(packet.rank) != packet.lease:
            raise DroppedError(
                f"{who}, lease {packet.lease}: the rank has left the job or was dropped from it since; the push is "
                "refused, and the rank has to stop"
            )
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
        own = not packet.sparse and packet.wire is None
        wire = layout if own else layout.of_gradients(packet.present, packet.sparse, packet.wire)
        expected = 0 if packet.rejected else wire.size_bytes(packet.present if own else None)
        received = 0 if gradients is None else gradients.numel()
        if received != expected:
            raise ProtocolError(
                f"{who}: {received} bytes of gradients, expected {expected}; ranks disagree on the model"
            )

    def _observe(self, packet: PushPacket, *, counts: bool) -> None:
        for block, observed in packet.scale.items():
            self._scale[block] = max(SCALE_DECAY * self._scale.get(block, 0.0), observed)
        if counts:
            self._window[packet.rank] = packet.energy * relative_age(
                packet.staleness,
                concurrency=len(self._leases) * self._lanes,
                pushes_per_version=self.pushes_per_version,
            )

    def _buffer(self, packet: PushPacket) -> PushBuffer:
        key = packet.optimizer, packet.inner
        if key not in self._buffers:
            self._buffers[key] = PushBuffer(GradientMean(by_samples=self._weight_by_samples))
        return self._buffers[key]

    def _apply_part(self, packet: PushPacket, gradients: Tensor | None, push: OpenPush) -> PushReceipt:
        """Step on some gradients of a push whose other packets are to come."""
        self._observe(packet, counts=False)
        if gradients is not None and not packet.rejected:
            served = self._prepared(packet)
            self._moved.update(packet.present)
            with torch.no_grad():
                tensors, factor = self._gradients(packet, gradients), self._buffer(packet).mean.factor(packet.samples)
                if factor != 1.0:
                    torch._foreach_mul_(tensors, factor)
                served.step(packet.inner, [self._weights.parameters[i] for i in packet.present], tensors)
                self._weights.publish(packet.present)
            self._published, push.applied = None, True
        receipt = PushReceipt(self.version, self.version - packet.base_version, applied=not packet.rejected)
        self._ledger.enter(packet, receipt)
        return receipt

    def _prepared(self, packet: PushPacket) -> ServedOptimizer:
        """The optimizer that a packet is for, with the groups and hyper-parameters of its rank."""
        served = self._served[packet.optimizer]
        served.regroup(packet.members, packet.groups)
        served.set_hyper_parameters(packet.rank, packet.groups)
        return served

    def _gradients(self, packet: PushPacket, buffer: Tensor) -> list[Tensor]:
        tensors = read_gradients(self.layout, packet.present, packet.sparse, buffer.to(self._device), packet.wire)
        if packet.wire is None:
            return tensors
        specs = [self.layout.specs[i] for i in packet.present]
        return [
            tensor if i in packet.sparse else widened(tensor, spec.dtype, packet.exponents.get(i, 0))
            for i, spec, tensor in zip(packet.present, specs, tensors, strict=True)
        ]

    def _join(self, buffer: PushBuffer, arrival: Arrival, gradients: Tensor | None, time_s: float) -> None:
        """Make a push part of the next version; step, if that completes it."""
        packet = arrival.packet
        buffer.count += 1
        complete = buffer.count >= self.pushes_per_version
        if not packet.rejected:
            self._prepared(packet)
            tensors = [] if gradients is None else self._gradients(packet, gradients)
            single = complete and buffer.mean.pushes == 0
            with torch.no_grad():
                weight = self._aggregation.weight(self.version - packet.base_version)
                samples = packet.samples / max(packet.steps, 1)
                buffer.mean.add(packet.present, tensors, samples, single=single, weight=weight)
        if arrival.waits or not packet.rejected:
            buffer.arrivals.append(arrival)
        if complete:
            self._apply((packet.optimizer, packet.inner), buffer, time_s)

    def _apply(self, key: tuple[int, str], buffer: PushBuffer, time_s: float) -> None:
        """Step one optimizer on the mean of what has arrived, and settle the arrivals."""
        before, arrivals = self.version, buffer.clear()
        if buffer.mean.pushes:
            optimizer, inner = key
            with torch.no_grad():
                indices, gradients = buffer.mean.take()
                self._moved.update(indices)
                self._served[optimizer].step(inner, [self._weights.parameters[i] for i in indices], gradients)
                self._weights.publish()
            self._published = None  # an outdated copy would only take up memory
            self.version += 1
            buffer.version = self.version
        for arrival in arrivals:
            packet = arrival.packet
            receipt = PushReceipt(self.version, before - packet.base_version, applied=not packet.rejected)
            self._settled[packet.key] = receipt
            self._ledger.amend(packet, receipt)
            if arrival.waits and self._cadence is not None:
                self._cadence.begin(packet.rank, time_s)
            if not packet.rejected:
                self._record(packet, arrival.push, receipt.staleness, time_s)

    def _apply_all(self, time_s: float) -> None:
        for key, buffer in self._buffers.items():
            self._apply(key, buffer, time_s)

    def _reconsider(self, time_s: float, *, meeting: bool = False) -> None:
        """Choose anew how pushes are gathered, if that is left to the times of arrival and enough has come."""
        if self._cadence is not None and self._cadence.due(self._leases, meeting=meeting):
            self._choose(time_s)

    def _choose(self, time_s: float) -> None:
        assert self._cadence is not None
        rounds = self._aggregation.rounds
        choice = self._cadence.decide(self._leases, rounds, version=self.version, time_s=time_s)
        if choice is None:
            return
        if choice.rounds != rounds:
            self._apply_all(time_s)  # nobody waits for what ends here
            self._aggregation = replace(self._aggregation, rounds=choice.rounds)
            if rounds is None:
                self._rounds_since = self.version
        self._choice = replace(choice, version=self.version)

    def _waiting(self) -> set[int]:
        """Ranks whose push waits for its round to end."""
        return {a.packet.rank for buffer in self._buffers.values() for a in buffer.arrivals if a.waits}

    def _record(self, packet: PushPacket, push: OpenPush, staleness: int, time_s: float, *, late: bool = False) -> None:
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
                late=late,
                bytes_sent=push.bytes_sent,
                bytes_saved=push.bytes_saved,
            )
        )

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
