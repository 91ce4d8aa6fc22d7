"""A rank's end of the protocol: which gradients go out, which weights come in, and what the rank waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    OuterStep,
    ParameterLayout,
    ServerSetup,
    ServerSnapshot,
    flatten,
    flatten_gradients,
    hyper_parameters,
    served_optimizers,
)
from lightning_g2.strategy.compression import ErrorFeedback
from lightning_g2.strategy.loaded_weights import LoadedWeights
from lightning_g2.strategy.local_steps import LocalSteps, is_exact
from lightning_g2.strategy.ownership import Ownership
from lightning_g2.strategy.recording import WindowNotes
from lightning_g2.strategy.stopwatch import Stopwatch
from lightning_g2.transport import Pending, PushReply, Transport, Weights
from lightning_g2.values import (
    GateDecision,
    PushNote,
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


@dataclass(frozen=True)
class PushHead:
    """What all packets of one push say alike.

    Attributes:
        optimizer: index of the optimizer that is stepping.
        base: version of the weights that the gradients were computed from.
        view: what the server said before the first decision.
        samples: training samples behind the gradients.
        inner: attribute of the optimizer that holds the optimizer to step instead; empty for itself.
        steps: optimizer steps that the rank has made itself, for a push of their sum; 0 for one of gradients.
        lane: see :class:`~lightning_g2.values.PushPacket`, as for the next.
        window: number of the window that the push closes.
    """

    optimizer: int
    base: int
    view: ServerView
    samples: int
    inner: str = ""
    steps: int = 0
    lane: int = 0
    window: int | None = None

    @property
    def staleness(self) -> int:
        """Staleness at the decision, versions."""
        return self.view.version - self.base


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
        server_device: where the server keeps weights and moments.
        by_tensor: the server may hand weights out tensor by tensor.
        wire: dtype in which larger dense gradients travel; None: each in its own.
        outer: ranks step themselves, and the server moves weights by their differences like this; None: by gradients.
        notes: what a recording needs of each push; None where nothing is recorded.
        lanes: windows of a rank that are under way at once.
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
        server_device: str = "cpu",
        by_tensor: bool = False,
        wire: torch.dtype | None = None,
        outer: OuterStep | None = None,
        notes: WindowNotes | None = None,
        lanes: int = 1,
    ) -> None:
        self.transport = transport
        self.base_version = 0
        self.spent = Stopwatch()
        self.configured = False
        self.local: LocalSteps | None = None
        self._rank = rank
        self._ranks = ranks
        self._optimizers = list(optimizers)
        self._prefetch = prefetch
        self._master_dtype = master_dtype
        self._weight_by_samples = weight_by_samples
        self._aggregation = aggregation
        self._server_device = server_device
        self._by_tensor = by_tensor
        self._feedback = ErrorFeedback(wire)
        self._outer = outer
        self._notes = notes
        self._lanes = lanes
        self._ownership = Ownership(named_parameters, optimizers)
        self._ownership.owned()  # a parameter of two optimizers is refused here
        served_optimizers(self._optimizers, aggregation)  # one without a delayed form, if that is asked for, here
        self._loaded = LoadedWeights(keep=prefetch)
        self._pending: list[Pending[PushReply]] = []
        self._sequences: Counter[int] = Counter()
        self._pushes = 0
        self._gradient_base: dict[int, int] = {}
        self._keeps_base = False
        self._base_weights: dict[str, Tensor] = {}

    @property
    def layout(self) -> ParameterLayout:
        """The parameters that the server owns."""
        return self._ownership.layout

    def configure(self, outer_state: Mapping[str, Any] | None = None, cadence: Mapping[str, Any] | None = None) -> None:
        """Hand weights, optimizers and their state over to the server; the rank keeps no optimizer state of its own.

        Args:
            outer_state: where ranks step themselves, what a checkpoint holds of the server's optimizer.
            cadence: where the size of rounds is chosen by itself, what a checkpoint holds of that.
        """
        owned = self._ownership.owned()
        layout = ParameterLayout.of(owned.items())
        self._ownership.bind(layout)
        index_of = self._ownership.index_of()
        masters: dict[int, Tensor] = {}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if (master := state.pop(MASTER_KEY, None)) is not None:
                    masters[index_of[id(parameter)]] = master.detach().cpu()
        if self._outer is None:
            served = served_optimizers(self._optimizers, self._aggregation)
        else:
            served = [self._outer.build(owned, outer_state)]
        self.transport.configure(
            ServerSetup(
                layout=layout,
                weights=_flat(layout, list(owned.values())),
                optimizers=tuple(OptimizerSpec.of(o, index_of) for o in served),
                ranks=self._ranks,
                master_dtype=self._master_dtype,
                masters=masters,
                weight_by_samples=self._weight_by_samples,
                aggregation=self._aggregation,
                cadence=cadence,
                device=self._server_device,
                by_tensor=self._by_tensor,
                lanes=self._lanes,
                record=None if self._notes is None else self._notes.path,
            )
        )

    def begin(self) -> None:
        """Start from the server's weights; the rank's copy of the optimizer state is freed, the server's counts."""
        for optimizer in self._optimizers if self._outer is None else ():
            optimizer.state.clear()
        self._sequences.clear()
        self._pushes = 0
        self._feedback.reset()
        self._ownership.bind(self.transport.layout())
        self._hand_over()
        self.load(self.transport.pull())
        self.configured = True

    def learning_rate(self, optimizer: int) -> float | dict[str, float]:
        """Learning rate at which the server takes a push: one number, or one a parameter where groups differ."""
        if self._outer is not None:
            return self._outer.lr
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
        if len(self._optimizers) < 2 or self._outer is not None:
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
        gradients = self.gradients(optimizer)
        if not gradients or not agreed:
            self._pull()
            return
        head = PushHead(optimizer, base, self.view(base, needs_view=needs_view), samples, inner)
        with self.spent.deciding():
            decision = route(self.by_name(gradients), head.view, head.staleness)
        self.send(head, gradients, decision)
        if not self._prefetch:
            self.finish()

    def push_difference(self, route: Route, *, steps: int, samples: int, needs_view: bool) -> None:
        """Route and push how far the rank's own steps have moved its weights, and load what the server then has.

        What has not moved is not sent. Where nothing has moved at all, an empty push tells that the steps were made.

        Args:
            route: the gate.
            steps: optimizer steps behind the difference, at least 1.
            samples: training samples behind them.
            needs_view: whether the gate looks at the server's version, window and scales.
        """
        differences = self._differences()
        head = PushHead(0, self.base_version, self.view(self.base_version, needs_view=needs_view), samples, steps=steps)
        named = self.by_name(differences)
        with self.spent.deciding():
            decision = route(named, head.view, head.staleness) if named else GateDecision(named)
        self.send(head, differences, decision)
        self.finish()

    def view(self, base: int, *, needs_view: bool) -> ServerView:
        """What the server says before a decision; nothing but the base's version where the gate does not look at it."""
        if not needs_view:
            return ServerView(base, {}, {})
        with self.spent.waiting():
            return self.transport.view()

    def by_name(self, gradients: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Gradients by parameter name."""
        return {self.layout.specs[i].name: gradient for i, gradient in gradients.items()}

    def send(
        self,
        head: PushHead,
        gradients: Mapping[int, Tensor],
        decision: GateDecision,
        *,
        last: bool = True,
        at: int = 0,
        unsent: tuple[int, ...] = (),
        fresh: bool = False,
    ) -> None:
        """Send a packet of a push; its answer is waited for in :meth:`finish`.

        Args:
            head: the push.
            gradients: the gradients that were routed, by index.
            decision: what the gate has decided on them; on the last packet with energy and weight of the whole push.
            last: the push ends with this packet.
            at: where in this rank's buffer for gradients there is room, bytes.
            unsent: further parameters of the push whose gradients were rejected; they count as saved bytes.
            fresh: the answer brings the new weights of these parameters.
        """
        layout = self.layout
        routed = {} if decision.rejected else {i: decision.gradients[layout.specs[i].name] for i in gradients}
        with torch.no_grad():
            routed, exponents = self._feedback.narrow(routed)
        present, sparse = tuple(routed), _sparse_shapes(routed)
        packet = PushPacket(
            rank=self._rank,
            lane=head.lane,
            sequence=self._sequences[head.lane],
            base_version=head.base,
            optimizer=head.optimizer,
            groups=_scaled(self._groups(head.optimizer), decision.lr_factor),
            members=self._ownership.members(head.optimizer) if self._outer is None else (layout.all(),),
            inner=head.inner,
            steps=head.steps,
            present=present,
            sparse=sparse,
            samples=head.samples,
            energy=decision.energy,
            weight=decision.weight,
            staleness=head.staleness,
            scale=decision.scale,
            rejected=decision.rejected,
            wire=self._feedback.wire,
            exponents=exponents,
            sent_bytes=self._size_bytes(present, sparse, self._feedback.wire),
            whole_bytes=self._size_bytes((*gradients, *unsent), _sparse_shapes(gradients)),
            window=head.window,
            fresh=fresh,
            last=last,
            note=self._note(head),
        )
        self._sequences[head.lane] += 1
        self._pushes += last
        buffer = None if decision.rejected else self._flattened(packet, routed, at)
        if last:
            self._loaded.forget()
        self._pending.append(self.transport.push(packet, buffer))

    def settle(self) -> None:
        """Send what the user's code, or steps of the rank's own, have changed; then load what pushes bring."""
        if self.local is not None and self.local.flush():
            return
        late = self.pushing
        edited = self.send_edits()
        self.finish()
        if edited and late:  # what has just come was sent before the change was
            self._pull()

    def changed(self) -> list[Tensor]:
        """The parameters that the user's code has changed since they were loaded."""
        return [p for i in self._loaded.changed() if (p := self._ownership.parameters[i]) is not None]

    def send_edits(self, among: Collection[int] | None = None) -> bool:
        """Send the weights that the user's code has changed, if any; returns whether there were any.

        After steps of the rank's own nobody can tell who has changed what: it all becomes part of the difference.

        Args:
            among: indices of the parameters to look at; None: all.
        """
        stepped = self.local is not None and self.local.unpushed > 0
        if not self.configured or stepped:
            return False
        with self.spent.copying():
            changed = self._loaded.changed(among)
        return self._edit(changed)

    def _edit(self, indices: Sequence[int]) -> bool:
        if not indices:
            return False
        layout = self.layout
        values, before = layout.allocate(indices), layout.allocate(indices)
        with torch.no_grad():
            flatten(layout, self._loaded.now(indices), indices, values)
            flatten(layout, self._loaded.before(indices), indices, before)
        with self.spent.waiting():
            self.transport.edit(WeightEdit(self._rank, self.base_version, tuple(indices)), values, before)
        self._loaded.accept(indices)
        return True

    def finish(self) -> None:
        """Wait for the push under way, if any, and load what it brought."""
        if (weights := self.await_replies()) is not None:
            self.load(weights)

    def await_replies(self) -> Weights | None:
        """Wait for the packets under way; returns the newest weights that they brought, None without any."""
        pending, self._pending = self._pending, []
        with self.spent.waiting():
            brought = [reply.weights for reply in [each.wait() for each in pending] if reply.weights is not None]
        return brought[-1] if brought else None

    def load_if_arrived(self) -> None:
        """Load what the push under way has brought, if it has arrived already.

        Where there are rounds, or may be, wait for it: a gradient of the weights before would be late for the next one.
        """
        if self.pushing and (self._aggregation.may_wait or all(each.done() for each in self._pending)):
            self.settle()

    def load(self, weights: Weights) -> None:
        """Copy weights into the module's parameters; from now on they are the base of this rank's gradients."""
        layout = self._ownership.layout
        views = layout.views(weights.buffer[: layout.size_bytes()])
        with self.spent.copying():
            self._ownership.load(views)
        self._loaded.remember(self._ownership.parameters, views)
        self.base_version = weights.version

    def load_some(self, weights: Weights, indices: Sequence[int]) -> None:
        """Copy some parameters' weights into the module; the base of this rank's gradients stays as it was."""
        layout = self._ownership.layout
        views = layout.views(weights.buffer[: layout.size_bytes()])
        here = {i: p for i in indices if (p := self._ownership.parameters[i]) is not None}
        with self.spent.copying(), torch.no_grad():
            for index, parameter in here.items():
                parameter.copy_(views[index])
        self._loaded.renew(here, views)

    @property
    def pushes(self) -> int:
        """Pushes sent since the start of the training; the last may be under way."""
        return self._pushes

    @property
    def pushing(self) -> bool:
        """Whether a push is under way."""
        return bool(self._pending)

    def ticket(self, request: TicketRequest) -> Ticket:
        """Ask for the next accumulation window."""
        with self.spent.waiting():
            return self.transport.ticket(request)

    def sync(self, point: str) -> SyncRelease:
        """Wait at a sync point for the other ranks and load the one version that all of them see."""
        self.settle()
        with self.spent.waiting():
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

    def _note(self, head: PushHead) -> PushNote | None:
        """What a recording needs of a push."""
        return None if self._notes is None else self._notes.take(self._optimizers[head.optimizer], head.view.arrivals)

    def keep_base_weights(self) -> None:
        """From now on :meth:`base_weights` is to be had while a push is routed.

        Raises:
            ConfigurationError: there are several optimizers, or ranks step themselves.
        """
        if self._outer is not None:
            raise ConfigurationError(
                "a gate that needs base weights, with local_steps: what is pushed is no gradient at any weights; use "
                "local_steps=1, or another gate"
            )
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
        with self.spent.waiting():
            weights = self.transport.pull()
        views = self.layout.views(weights.buffer[: self.layout.size_bytes()])
        return {spec.name: view for spec, view in zip(self.layout.specs, views, strict=True)}

    def _note_base(self) -> None:
        """What a push under way brings is loaded over the weights that the gradients were computed from."""
        late = self.pushing
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

    def renew(self) -> bool:
        """Agree with the server on parameters that are new to the optimizers, if any; then all weights are loaded.

        Returns:
            Whether gradients that the rank now holds may be used, see :meth:`_hand_over`.
        """
        if not self._ownership.changed():
            return True
        self.settle()
        agreed = self._hand_over()
        self._pull()
        return agreed

    def _groups(self, optimizer: int) -> tuple[dict[str, Any], ...]:
        """Hyper-parameters of the groups that the server steps with."""
        if self._outer is not None:
            return (self._outer.hyper_parameters(),)
        return tuple(hyper_parameters(group) for group in self._optimizers[optimizer].param_groups)

    def _differences(self) -> dict[int, Tensor]:
        """Weights loaded minus weights now, of those that have changed, by index; integers are sent as an edit."""
        changed = self._loaded.changed()
        self._edit([i for i in changed if is_exact(self.layout.specs[i].dtype)])
        moved = [i for i in changed if not is_exact(self.layout.specs[i].dtype)]
        if not moved:
            return {}
        with torch.no_grad():
            differences = torch._foreach_sub(self._loaded.before(moved), self._loaded.now(moved))
        return dict(zip(moved, differences, strict=True))

    def _pull(self) -> None:
        with self.spent.waiting():
            weights = self.transport.pull()
        self.load(weights)

    @property
    def regrouped(self) -> bool:
        """Whether the optimizers' groups have changed since the server last heard of them."""
        return self._ownership.changed()

    def indices(self, optimizer: int) -> list[int]:
        """Indices of an optimizer's parameters."""
        return [i for group in self._ownership.members(optimizer) for i in group]

    def parameter(self, index: int) -> torch.nn.Parameter | None:
        """The parameter with an index in the layout; None where this rank does not have it."""
        return self._ownership.parameters[index]

    def gradients(self, optimizer: int) -> dict[int, Tensor]:
        """Gradients that the optimizer's parameters now hold, by index."""
        return {i: g for i in self.indices(optimizer) if (g := self.gradient(i)) is not None}

    def gradient(self, index: int) -> Tensor | None:
        """The gradient that a parameter now holds."""
        parameter = self.parameter(index)
        gradient = None if parameter is None else parameter.grad
        if gradient is not None and gradient.layout not in (torch.strided, torch.sparse_coo):
            raise ConfigurationError(
                f"gradient of {self.layout.specs[index].name!r}: layout {gradient.layout}; the server takes dense "
                "and COO-sparse gradients: convert it with .to_sparse_coo() or .to_dense()"
            )
        return gradient

    def _size_bytes(
        self, present: tuple[int, ...], sparse: Mapping[int, SparseShape], wire: torch.dtype | None = None
    ) -> int:
        layout = self.layout
        if not sparse and wire is None:
            return layout.size_bytes(present)  # the layout remembers it
        return layout.of_gradients(present, sparse, wire).size_bytes()

    def _flattened(self, packet: PushPacket, gradients: Mapping[int, Tensor], at: int) -> Tensor:
        present, sparse, wire = packet.present, packet.sparse, packet.wire
        buffer = self.transport.gradient_buffer(packet.sent_bytes, at)
        with torch.no_grad(), self.spent.copying():
            if sparse or wire is not None:
                flatten_gradients(self.layout, list(gradients.values()), present, sparse, buffer, wire)
            else:
                flatten(self.layout, list(gradients.values()), present, buffer)
        return buffer


def _flat(layout: ParameterLayout, parameters: Sequence[Tensor]) -> Tensor:
    buffer = layout.allocate()
    with torch.no_grad():
        flatten(layout, parameters, layout.all(), buffer)
    return buffer


def _scaled(groups: tuple[dict[str, Any], ...], lr_factor: float) -> tuple[dict[str, Any], ...]:
    """Hyper-parameters of groups, their learning rates times what the gate has decided."""
    if lr_factor == 1.0:
        return groups
    return tuple({**group, "lr": group["lr"] * lr_factor} if "lr" in group else group for group in groups)


def _sparse_shapes(gradients: Mapping[int, Tensor]) -> dict[int, SparseShape]:
    return {i: SparseShape(g.sparse_dim(), g._nnz(), g.is_coalesced()) for i, g in gradients.items() if g.is_sparse}
