"""A rank's end of the protocol: which gradients go out, which weights come in, and what the rank waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.server import OptimizerSpec, ParameterLayout, ServerSetup, flatten, hyper_parameters
from lightning_g2.strategy.loaded_weights import LoadedWeights
from lightning_g2.transport import Pending, PushReply, Transport, Weights
from lightning_g2.values import GateDecision, PushPacket, ServerView, SyncRelease, Ticket, TicketRequest, WeightEdit

Route = Callable[[Mapping[str, Tensor], ServerView, int], GateDecision]
"""Decides on gradients by name, given what the server says and the gradients' staleness."""


class RankClient:
    """Pushes the gradients of a module's optimizers and loads the server's weights into its parameters.

    Args:
        transport: this rank's started connection.
        rank: this rank.
        ranks: number of ranks.
        named_parameters: the module's parameters, tied ones once.
        optimizers: the module's optimizers.
        prefetch: whether a push is left under way when :meth:`push` returns.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        rank: int,
        ranks: int,
        named_parameters: Mapping[str, torch.nn.Parameter],
        optimizers: Sequence[Optimizer],
        prefetch: bool,
    ) -> None:
        self.transport = transport
        self.base_version = 0
        self.wait_s = 0.0
        self.configured = False
        self._rank = rank
        self._ranks = ranks
        self._optimizers = list(optimizers)
        self._prefetch = prefetch
        self._named = _owned_parameters(named_parameters, optimizers)
        self._names = tuple(self._named)
        self._parameters = tuple(self._named.values())
        self._index_of = {id(p): i for i, p in enumerate(self._parameters)}
        self._layout = ParameterLayout.of(self._named.items())
        self._owned = [tuple(self._index_of[id(p)] for g in o.param_groups for p in g["params"]) for o in optimizers]
        self._loaded = LoadedWeights(self._parameters, keep=prefetch)
        self._pending: Pending[PushReply] | None = None
        self._sequence = 0
        self._gradient_base: dict[int, int] = {}

    @property
    def layout(self) -> ParameterLayout:
        """The parameters that the server owns."""
        return self._layout

    def configure(self) -> None:
        """Hand weights, optimizers and their state over to the server; the rank keeps no optimizer state of its own."""
        weights = self._layout.allocate()
        with torch.no_grad():
            flatten(self._layout, self._parameters, self._layout.all(), weights)
        specs = tuple(OptimizerSpec.of(o, self._index_of) for o in self._optimizers)
        self.transport.configure(ServerSetup(self._layout, weights, specs, self._ranks))

    def begin(self) -> None:
        """Start from the server's weights; the rank's copy of the optimizer state is freed, the server's counts."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._sequence = 0
        self.load(self.transport.pull())
        self.configured = True

    def learning_rate(self, optimizer: int) -> float | dict[str, float]:
        """Learning rate of an optimizer: one number, or one for each parameter where its groups differ."""
        groups = self._optimizers[optimizer].param_groups
        rates = [float(group.get("lr", 1.0)) for group in groups]
        if len(set(rates)) == 1:
            return rates[0]
        names = {id(p): name for name, p in self._named.items()}
        return {names[id(p)]: rate for group, rate in zip(groups, rates, strict=True) for p in group["params"]}

    def note_gradients(self) -> None:
        """A backward has ended: gradients that are new belong to the weights this rank has now.

        Of one optimizer that is clear without notes. With several, the push of the first brings weights that the
        gradients of the others were not computed from.
        """
        if len(self._optimizers) < 2:
            return
        for index, owned in enumerate(self._owned):
            if any(self._parameters[i].grad is not None for i in owned):
                self._gradient_base.setdefault(index, self.base_version)
            else:
                self._gradient_base.pop(index, None)

    def push(self, optimizer: int, route: Route, *, samples: int, needs_view: bool) -> None:
        """Route and push the gradients that the optimizer's parameters now hold.

        When no parameter has a gradient nothing is pushed, as the optimizer would do nothing: such a batch moves no
        moment either. The newest weights come all the same.

        Args:
            optimizer: index of the optimizer that is stepping.
            route: the gate.
            samples: training samples behind the gradients.
            needs_view: whether the gate looks at the server's version, window and scales.
        """
        base = self._gradient_base.pop(optimizer, self.base_version)
        self.settle()  # what an earlier push brings may move the base on: that of these gradients is known already
        present = tuple(i for i in self._owned[optimizer] if self._parameters[i].grad is not None)
        if not present:
            with self._waiting():
                weights = self.transport.pull()
            self.load(weights)
            return
        gradients = {self._names[i]: self._gradient(i) for i in present}
        with self._waiting():
            view = self.transport.view() if needs_view else ServerView(base, {}, {})
        decision = route(gradients, view, view.version - base)
        packet = PushPacket(
            rank=self._rank,
            lane=0,
            sequence=self._sequence,
            base_version=base,
            optimizer=optimizer,
            groups=tuple(hyper_parameters(g) for g in self._optimizers[optimizer].param_groups),
            present=() if decision.rejected else present,
            samples=samples,
            energy=decision.energy,
            weight=decision.weight,
            staleness=view.version - base,
            scale=decision.scale,
            rejected=decision.rejected,
        )
        self._sequence += 1
        buffer = None if decision.rejected else self._flattened(present, decision.gradients)
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

    def changed(self) -> tuple[int, ...]:
        """Indices of the parameters that the user's code has changed since they were loaded."""
        return self._loaded.changed()

    def send_edits(self) -> bool:
        """Send the weights that the user's code has changed, if any; returns whether there were any."""
        indices = self._loaded.changed() if self.configured else ()
        if not indices:
            return False
        values, before = self._layout.allocate(indices), self._layout.allocate(indices)
        with torch.no_grad():
            flatten(self._layout, [self._parameters[i] for i in indices], indices, values)
            flatten(self._layout, self._loaded.before(indices), indices, before)
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
        """Load what the push under way has brought, if it has arrived already."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def load(self, weights: Weights) -> None:
        """Copy weights into the module's parameters; from now on they are the base of this rank's gradients."""
        with torch.no_grad():
            views = self._layout.views(weights.buffer)
            if views:
                torch._foreach_copy_(list(self._parameters), views)
            self._loaded.remember(views)
        self.base_version = weights.version

    @property
    def pushing(self) -> bool:
        """Whether a push is under way."""
        return self._pending is not None

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

    def snapshot(self) -> tuple[int, dict[str, Tensor], list[dict[Tensor, object]]]:
        """A server version, its weights by name, and its optimizer states by parameter."""
        snapshot = self.transport.snapshot()
        weights = dict(zip(self._names, self._layout.views(snapshot.weights), strict=True))
        states: list[dict[Tensor, object]] = [
            {self._parameters[i]: state for i, state in states.items()} for states in snapshot.states
        ]
        return snapshot.version, weights, states

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the server owns, by name."""
        return dict(self._named)

    def weights(self) -> dict[str, Tensor]:
        """The weights that this rank has, by name; detached, not copied."""
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def _gradient(self, index: int) -> Tensor:
        gradient = self._parameters[index].grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ConfigurationError(
                f"gradient of {self._names[index]!r}: layout {gradient.layout}; the server takes dense gradients: "
                "construct the embedding with sparse=False"
            )
        return gradient

    def _flattened(self, present: tuple[int, ...], gradients: Mapping[str, Tensor]) -> Tensor:
        buffer = self.transport.gradient_buffer(self._layout.size_bytes(present))
        with torch.no_grad():
            flatten(self._layout, [gradients[self._names[i]] for i in present], present, buffer)
        return buffer

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - start


def _owned_parameters(
    named_parameters: Mapping[str, torch.nn.Parameter], optimizers: Sequence[Optimizer]
) -> dict[str, torch.nn.Parameter]:
    """The optimizers' parameters by name, in the module's order; those outside the module come last.

    Raises:
        ConfigurationError: a parameter belongs to two optimizers.
    """
    names = {id(p): name for name, p in named_parameters.items()}
    owner: dict[int, int] = {}
    owned: dict[int, torch.nn.Parameter] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owner.setdefault(id(parameter), number) != number:
                    name = names.get(id(parameter), "a parameter outside the module")
                    raise ConfigurationError(
                        f"parameter {name!r}: belongs to optimizers {owner[id(parameter)]} and {number}; a server "
                        "keeps one optimizer state for each parameter: give it to one optimizer"
                    )
                owned[id(parameter)] = parameter
    inside = {name: p for name, p in named_parameters.items() if id(p) in owned}
    outside = {f"outside.{i}": p for i, p in enumerate(p for key, p in owned.items() if key not in names)}
    return inside | outside
