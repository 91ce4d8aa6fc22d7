"""A rank's end of the protocol: which gradients go out, which weights come in, and what the rank waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.server import (
    ASYNCHRONOUS,
    MASTER_KEY,
    Aggregation,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    ServerSnapshot,
    flatten,
    flatten_gradients,
    hyper_parameters,
)
from lightning_g2.strategy.loaded_weights import LoadedWeights
from lightning_g2.strategy.ownership import Ownership
from lightning_g2.strategy.recording import WindowNotes
from lightning_g2.transport import Pending, PushReply, Transport, Weights
from lightning_g2.values import (
    GateDecision,
    PushPacket,
    ServerView,
    SparseShape,
    SyncRelease,
    Ticket,
    TicketRequest,
    WeightEdit,
)

Route = Callable[[Mapping[str, Tensor], ServerView, int], GateDecision]
"""Decides on gradients by name, given what the server says and the gradients' staleness."""


class RankClient:
    """Pushes the gradients of a module's optimizers and loads the server's weights into its parameters.

    Args:
        transport: this rank's started connection.
        rank: this rank.
        ranks: number of ranks.
        named_parameters: gives the module's parameters by name, tied ones once.
        optimizers: the module's optimizers.
        prefetch: whether a push is left under way when :meth:`push` returns.
        master_dtype: dtype in which the server keeps half-precision parameters; None keeps the module's.
        weight_by_samples: the server weighs a push by its samples.
        aggregation: how many pushes make one version.
        notes: what a recording needs of each push; None where nothing is recorded.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        rank: int,
        ranks: int,
        named_parameters: Callable[[], Iterable[tuple[str, torch.nn.Parameter]]],
        optimizers: Sequence[Optimizer],
        prefetch: bool,
        master_dtype: torch.dtype | None = None,
        weight_by_samples: bool = False,
        aggregation: Aggregation = ASYNCHRONOUS,
        notes: WindowNotes | None = None,
    ) -> None:
        self.transport = transport
        self.base_version = 0
        self.wait_s = 0.0
        self.configured = False
        self._rank = rank
        self._ranks = ranks
        self._optimizers = list(optimizers)
        self._prefetch = prefetch
        self._master_dtype = master_dtype
        self._weight_by_samples = weight_by_samples
        self._aggregation = aggregation
        self._notes = notes
        self._ownership = Ownership(named_parameters, optimizers)
        self._ownership.owned()  # a parameter of two optimizers is refused here
        self._loaded = LoadedWeights(keep=prefetch)
        self._pending: Pending[PushReply] | None = None
        self._sequence = 0
        self._gradient_base: dict[int, int] = {}
        self._keeps_base = False
        self._base_weights: dict[str, Tensor] = {}

    @property
    def layout(self) -> ParameterLayout:
        """The parameters that the server owns."""
        return self._ownership.layout

    def configure(self) -> None:
        """Hand weights, optimizers and their state over to the server; the rank keeps no optimizer state of its own."""
        owned = self._ownership.owned()
        layout = ParameterLayout.of(owned.items())
        self._ownership.bind(layout)
        index_of = self._ownership.index_of()
        masters: dict[int, Tensor] = {}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if (master := state.pop(MASTER_KEY, None)) is not None:
                    masters[index_of[id(parameter)]] = master.detach().cpu()
        self.transport.configure(
            ServerSetup(
                layout=layout,
                weights=_flat(layout, list(owned.values())),
                optimizers=tuple(OptimizerSpec.of(o, index_of) for o in self._optimizers),
                ranks=self._ranks,
                master_dtype=self._master_dtype,
                masters=masters,
                weight_by_samples=self._weight_by_samples,
                aggregation=self._aggregation,
                record=None if self._notes is None else self._notes.path,
            )
        )

    def begin(self) -> None:
        """Start from the server's weights; the rank's copy of the optimizer state is freed, the server's counts."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._sequence = 0
        self._ownership.bind(self.transport.layout())
        self._hand_over()
        self.load(self.transport.pull())
        self.configured = True

    def learning_rate(self, optimizer: int) -> float | dict[str, float]:
        """Learning rate of an optimizer: one number, or one for each parameter where its groups differ."""
        groups = self._optimizers[optimizer].param_groups
        rates = [float(group.get("lr", 1.0)) for group in groups]
        if len(set(rates)) == 1:
            return rates[0]
        specs, members = self.layout.specs, self._ownership.members(optimizer)
        return {specs[i].name: rate for group, rate in zip(members, rates, strict=True) for i in group}

    def note_gradients(self) -> None:
        """A backward has ended: gradients that are new belong to the weights this rank has now.

        Of one optimizer that is clear without notes. With several, the push of the first brings weights that the
        gradients of the others were not computed from.
        """
        if len(self._optimizers) < 2:
            return
        for index, optimizer in enumerate(self._optimizers):
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self._gradient_base.setdefault(index, self.base_version)
            else:
                self._gradient_base.pop(index, None)

    def push(self, optimizer: int, route: Route, *, samples: int, needs_view: bool, inner: str = "") -> None:
        """Route and push the gradients that the optimizer's parameters now hold.

        When no parameter has a gradient nothing is pushed, as the optimizer would do nothing: such a batch moves no
        moment either. The newest weights come all the same.

        Args:
            optimizer: index of the optimizer that is stepping.
            route: the gate.
            samples: training samples behind the gradients.
            needs_view: whether the gate looks at the server's version, window and scales.
            inner: attribute of the optimizer that holds the optimizer to step instead; empty for itself.
        """
        base = self._gradient_base.pop(optimizer, self.base_version)
        if self._keeps_base:
            self._note_base()
        self.settle()  # what an earlier push brings may move the base on: that of these gradients is known already
        agreed = not self._ownership.changed() or self._hand_over()
        gradients = self._gradients(optimizer)
        if not gradients or not agreed:
            with self._waiting():
                weights = self.transport.pull()
            self.load(weights)
            return
        with self._waiting():
            view = self.transport.view() if needs_view else ServerView(base, {}, {})
        specs = self.layout.specs
        decision = route({specs[i].name: g for i, g in gradients.items()}, view, view.version - base)
        routed = {} if decision.rejected else {i: decision.gradients[specs[i].name] for i in gradients}
        packet = PushPacket(
            rank=self._rank,
            lane=0,
            sequence=self._sequence,
            base_version=base,
            optimizer=optimizer,
            groups=tuple(_hyper_parameters(g, decision.lr_factor) for g in self._optimizers[optimizer].param_groups),
            members=self._ownership.members(optimizer),
            inner=inner,
            present=tuple(routed),
            sparse={i: _sparse_shape(g) for i, g in routed.items() if g.is_sparse},
            samples=samples,
            energy=decision.energy,
            weight=decision.weight,
            staleness=view.version - base,
            scale=decision.scale,
            rejected=decision.rejected,
            note=None if self._notes is None else self._notes.take(self._optimizers[optimizer], view.arrivals),
        )
        self._sequence += 1
        buffer = None if decision.rejected else self._flattened(packet, routed)
        self._loaded.forget()
        self._pending = self.transport.push(packet, buffer)
        if not self._prefetch:
            self.finish()

    def settle(self) -> None:
        """Send what the user's code has changed in the weights, then load what the push under way brings."""
        late = self._pending is not None
        edited = self.send_edits()
        self.finish()
        if edited and late:  # what has just come was sent before the change was
            with self._waiting():
                weights = self.transport.pull()
            self.load(weights)

    def changed(self) -> list[Tensor]:
        """The parameters that the user's code has changed since they were loaded."""
        return [p for i in self._loaded.changed() if (p := self._ownership.parameters[i]) is not None]

    def send_edits(self) -> bool:
        """Send the weights that the user's code has changed, if any; returns whether there were any."""
        indices = self._loaded.changed() if self.configured else ()
        if not indices:
            return False
        layout = self.layout
        values, before = layout.allocate(indices), layout.allocate(indices)
        with torch.no_grad():
            flatten(layout, self._loaded.now(indices), indices, values)
            flatten(layout, self._loaded.before(indices), indices, before)
        with self._waiting():
            self.transport.edit(WeightEdit(self._rank, self.base_version, indices), values, before)
        self._loaded.accept(indices)
        return True

    def finish(self) -> None:
        """Wait for the push under way, if any, and load what it brought."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._waiting():
                reply = pending.wait()
            self.load(reply.weights)

    def load_if_arrived(self) -> None:
        """Load what the push under way has brought, if it has arrived already.

        In rounds wait for it: a gradient of the weights before would come too late for the next round.
        """
        if self._pending is not None and (self._aggregation.rounds is not None or self._pending.done()):
            self.settle()

    def load(self, weights: Weights) -> None:
        """Copy weights into the module's parameters; from now on they are the base of this rank's gradients."""
        layout = self._ownership.layout
        views = layout.views(weights.buffer[: layout.size_bytes()])
        self._ownership.load(views)
        self._loaded.remember(self._ownership.parameters, views)
        self.base_version = weights.version

    @property
    def pushes(self) -> int:
        """Pushes sent since the start of the training; the last may be under way."""
        return self._sequence

    def ticket(self, request: TicketRequest) -> Ticket:
        """Ask for the next accumulation window."""
        with self._waiting():
            return self.transport.ticket(request)

    def sync(self, point: str) -> SyncRelease:
        """Wait at a sync point for the other ranks and load the one version that all of them see."""
        self.settle()
        with self._waiting():
            reply = self.transport.sync(point)
        self.load(reply.weights)
        return reply.release

    def snapshot(self) -> tuple[dict[str, Tensor], ServerSnapshot]:
        """Weights by name, and the optimizers, of one server version."""
        snapshot = self.transport.snapshot()
        names = [spec.name for spec in snapshot.layout.specs]
        return dict(zip(names, snapshot.layout.views(snapshot.weights), strict=True)), snapshot

    def server_parameters(self, layout: ParameterLayout) -> list[torch.nn.Parameter | None]:
        """This rank's parameter for each of a layout, None where it does not know one."""
        known = dict(zip((spec.name for spec in self.layout.specs), self._ownership.parameters, strict=True))
        return [known.get(spec.name) for spec in layout.specs]

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the server owns, by name."""
        named = zip(self.layout.specs, self._ownership.parameters, strict=True)
        return {spec.name: parameter for spec, parameter in named if parameter is not None}

    def weights(self) -> dict[str, Tensor]:
        """The weights that this rank has, by name; detached, not copied."""
        return {name: parameter.detach() for name, parameter in self.named_parameters().items()}

    def keep_base_weights(self) -> None:
        """From now on :meth:`base_weights` is to be had while a push is routed.

        Raises:
            ConfigurationError: there are several optimizers.
        """
        if len(self._optimizers) > 1:
            raise ConfigurationError(
                f"a gate that needs base weights, with {len(self._optimizers)} optimizers: one push brings weights "
                "that the gradients of the others were not computed from; use one optimizer, or another gate"
            )
        self._keeps_base = True

    def base_weights(self) -> dict[str, Tensor]:
        """The weights that the gradients of the push under decision were computed from, by name; detached."""
        return self._base_weights

    def current_weights(self) -> dict[str, Tensor]:
        """The server's weights, by name, on the CPU and valid until the next push; the rank's own stay as they are."""
        self._loaded.forget()
        with self._waiting():
            weights = self.transport.pull()
        views = self.layout.views(weights.buffer[: self.layout.size_bytes()])
        return {spec.name: view for spec, view in zip(self.layout.specs, views, strict=True)}

    def _note_base(self) -> None:
        """What a push under way brings is loaded over the weights that the gradients were computed from."""
        late = self._pending is not None
        self._base_weights = {name: w.clone() if late else w for name, w in self.weights().items()}

    def _hand_over(self) -> bool:
        """Give the server parameters that optimizers have been given since, and learn of those from other ranks.

        Returns:
            Whether the server has the values of lazy parameters that this rank has: another rank may have given them
            theirs first, and then gradients belong to weights that nobody has. Frozen ones are equal on all ranks.
        """
        lazy = {name for name, p in self._ownership.named().items() if self._ownership.was_lazy(p)}
        known = {spec.name for spec in self.layout.specs}
        missing = {name: p for name, p in self._ownership.owned().items() if name not in known}
        if not missing:
            self._ownership.bind(self.transport.layout())
            return True
        layout = ParameterLayout.of(missing.items())
        self._ownership.bind(self.transport.adopt(layout, _flat(layout, list(missing.values()))))
        if self._ranks == 1 or not lazy & set(missing):
            return True
        views = self.layout.views(self.transport.pull().buffer[: self.layout.size_bytes()])
        theirs = dict(zip((spec.name for spec in self.layout.specs), views, strict=True))
        return all(torch.equal(theirs[name], missing[name].detach().cpu()) for name in lazy & set(missing))

    def _gradients(self, optimizer: int) -> dict[int, Tensor]:
        """Gradients that the optimizer's parameters now hold, by index."""
        gradients: dict[int, Tensor] = {}
        for index in (i for group in self._ownership.members(optimizer) for i in group):
            parameter = self._ownership.parameters[index]
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                continue
            if gradient.layout not in (torch.strided, torch.sparse_coo):
                raise ConfigurationError(
                    f"gradient of {self.layout.specs[index].name!r}: layout {gradient.layout}; the server takes dense "
                    "and COO-sparse gradients: convert it with .to_sparse_coo() or .to_dense()"
                )
            gradients[index] = gradient
        return gradients

    def _flattened(self, packet: PushPacket, gradients: Mapping[int, Tensor]) -> Tensor:
        layout = self.layout
        with torch.no_grad():
            if packet.sparse:
                push = layout.of_gradients(packet.present, packet.sparse)
                buffer = self.transport.gradient_buffer(push.size_bytes())
                flatten_gradients(layout, list(gradients.values()), packet.present, packet.sparse, buffer)
            else:
                buffer = self.transport.gradient_buffer(layout.size_bytes(packet.present))
                flatten(layout, list(gradients.values()), packet.present, buffer)
        return buffer

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - start


def _flat(layout: ParameterLayout, parameters: Sequence[Tensor]) -> Tensor:
    buffer = layout.allocate()
    with torch.no_grad():
        flatten(layout, parameters, layout.all(), buffer)
    return buffer


def _hyper_parameters(group: dict[str, Any], lr_factor: float) -> dict[str, Any]:
    """A group as the server takes it, its learning rate times what the gate has decided."""
    values = hyper_parameters(group)
    if lr_factor != 1.0 and "lr" in values:
        values["lr"] = values["lr"] * lr_factor
    return values


def _sparse_shape(gradient: Tensor) -> SparseShape:
    return SparseShape(gradient.sparse_dim(), gradient._nnz(), gradient.is_coalesced())
