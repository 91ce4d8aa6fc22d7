"""Server, gates and module of a simulated job: what happens at an arrival, without a notion of when."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import Gate, GateContext, GateDecision
from lightning_g2.server import (
    Aggregation,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    ServerState,
    flatten,
    flatten_gradients,
    hyper_parameters,
    served_optimizers,
)
from lightning_g2.simulate.observation import Observation, Observer
from lightning_g2.simulate.source import BatchSource, Loss, seed_torch
from lightning_g2.simulate.versions import HeldVersions
from lightning_g2.values import PushKey, PushPacket, PushReceipt, ServerView, SparseShape


@dataclass(frozen=True)
class Gradient:
    """One gradient under way.

    Attributes:
        rank: who computes it.
        k: gradients that the rank has begun before.
        number: gradients that all ranks have begun before.
        read: pushes that had arrived when its weights were read.
        versions: versions of its weights, by group of blocks that are read together; the first is the base.
        lr_factor: of the schedule, when it was begun.
        seed: of its randomness.
        rng: state of torch's generator on the CPU after its batch was loaded, in place of a seed.
        rates: learning rates of the groups, in place of a factor.
        view: what its gate sees of the server; None for its present state.
    """

    rank: int
    k: int
    number: int
    read: int
    versions: tuple[int, ...]
    lr_factor: float
    seed: int
    rng: Tensor | None = None
    rates: tuple[float, ...] | None = None
    view: ServerView | None = None


@dataclass
class Arrivals:
    """What the pushes so far were; one entry a push in each list."""

    staleness: list[int] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    rejected: list[bool] = field(default_factory=list)
    late: list[bool] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


class Job:
    """A simulated job.

    Args:
        model: the module that computes all ranks' gradients; trained in place.
        loss: its loss.
        optimizer: steps on the server; taken apart there as a real one is.
        make_gate: makes one gate a rank.
        source: gives batches.
        ranks: number of ranks.
        aggregation: how many pushes make one version.
        clip: largest norm of a gradient; None for any.
        groups: makes of the parameters' names the indices of those that are read together, in the order of the reads.
        observe: is shown each push once it has been taken in; None for nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        *,
        make_gate: Callable[[], Gate],
        source: BatchSource,
        ranks: int,
        aggregation: Aggregation,
        clip: float | None,
        groups: Callable[[Sequence[str]], list[list[int]]],
        observe: Observer | None = None,
    ) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if id(p) in stepped}
        if len(named) != len(stepped):
            raise ConfigurationError(
                f"optimizer: steps {len(stepped)} parameters, {len(named)} of them are the model's; make it of those "
                "that it is given"
            )
        self.model, self.ranks, self.arrivals = model, ranks, Arrivals()
        self._loss, self._source, self._clip, self._make_gate = loss, source, clip, make_gate
        self._observe = observe
        self._names, self._parameters = list(named), list(named.values())
        self._layout = ParameterLayout.of(named.items())
        self._groups = groups(self._names)
        index = {id(p): i for i, p in enumerate(self._parameters)}
        buffer = self._layout.allocate()
        with torch.no_grad():
            flatten(self._layout, self._parameters, self._layout.all(), buffer)
        specs = tuple(OptimizerSpec.of(served, index) for served in served_optimizers([optimizer], aggregation))
        self._state = ServerState(ServerSetup(self._layout, buffer, specs, ranks, aggregation=aggregation))
        self.versions = HeldVersions(self._state)
        self._hyper = [hyper_parameters(group) for group in optimizer.param_groups]
        self._members = [[index[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._gates: dict[int, Gate] = {}
        self._pushed: dict[int, int] = {}
        self._loaded: tuple[int, ...] = ()
        self._evaluations = 0
        self._open: dict[PushKey, int] = {}  # pushes that wait for others to be applied with, by number

    @property
    def count(self) -> int:
        """Pushes that have arrived."""
        return len(self.arrivals.rank)

    @property
    def group_count(self) -> int:
        """Groups of blocks that are read together."""
        return len(self._groups)

    def gate(self, rank: int) -> Gate:
        """The gate of a rank."""
        if rank not in self._gates:
            self._gates[rank] = self._make_gate()
        return self._gates[rank]

    def pushed(self, rank: int) -> int:
        """Pushes of a rank that have arrived."""
        return self._pushed.get(rank, 0)

    def arrive(self, gradient: Gradient, time: float) -> tuple[GateDecision, PushReceipt]:
        """Compute a gradient, have it judged, and take it in; its versions are released.

        Args:
            gradient: what arrives.
            time: when.
        """
        rank, base = gradient.rank, gradient.versions[0]
        tensors = self._compute(gradient)
        gate = self.gate(rank)
        view = (gradient.view or self._state.view()) if gate.needs_view else ServerView(base, {}, {})
        context = self._context(gradient, gate, view)
        gradients = {self._names[i]: g for i, g in tensors.items()}
        decision = gate.decide(gradients, context)
        for version in gradient.versions:
            self.versions.release(version)
        routed = {} if decision.rejected else {i: decision.gradients[self._names[i]] for i in tensors}
        rates = self._rates(gradient)
        packet = PushPacket(
            rank=rank,
            lane=0,
            sequence=self.pushed(rank),
            base_version=base,
            groups=tuple({**g, "lr": lr * decision.lr_factor} for g, lr in zip(self._hyper, rates, strict=True)),
            present=tuple(routed),
            sparse={
                i: SparseShape(g.sparse_dim(), g._nnz(), g.is_coalesced()) for i, g in routed.items() if g.is_sparse
            },
            samples=1,
            energy=decision.energy,
            weight=decision.weight,
            staleness=context.staleness,
            scale=decision.scale,
            rejected=decision.rejected,
        )
        before = None if self._observe is None else self._current()
        with torch.no_grad():
            receipt = self._state.push(packet, self._flattened(packet, routed), time_s=time)
        self._pushed[rank] = packet.sequence + 1
        if self._observe is not None and before is not None:
            self._observe(
                Observation(
                    number=self.count, time=time, gradients=gradients, context=context, decision=decision,
                    receipt=receipt, before=before, after=self._current(),
                )
            )  # fmt: skip
        self._note(packet, receipt, time)
        return decision, receipt

    def begin(self, rank: int, time: float) -> None:
        """A rank begins a gradient."""
        self._state.begin(rank, time_s=time)

    def released(self) -> list[int]:
        """Ranks whose round has ended since the last call, in the order in which their pushes arrived."""
        ranks: list[int] = []
        for key, receipt in self._state.settled().items():
            number = self._open.pop(key)
            self.arrivals.staleness[number] = receipt.staleness
            self.arrivals.version[number] = receipt.version
            ranks.append(key[0])
        return ranks

    def view(self) -> ServerView:
        """What a gate sees of the server now."""
        return self._state.view()

    def close_rounds(self, idle: Collection[int], time: float) -> None:
        """End the round that nobody can join any more.

        Args:
            idle: ranks that wait for anything but the round.
            time: now.
        """
        self._state.close_rounds(idle, time_s=time)

    def finish(self) -> float:
        """Apply what has been gathered, load the final weights into the module and evaluate it."""
        self._state.flush(time_s=self.arrivals.time[-1] if self.count else 0.0)
        self.released()
        version = self.versions.hold()
        self._load((version,) * len(self._groups))
        self.versions.release(version)
        batches = self._source.evaluation()
        self.model.eval()
        with torch.no_grad():
            return sum(float(self._loss(self.model, batch)) for batch in batches) / len(batches)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights that the module holds."""
        return {name: p.detach().clone() for name, p in zip(self._names, self._parameters, strict=True)}

    def _compute(self, gradient: Gradient) -> dict[int, Tensor]:
        self._load(gradient.versions)
        self._look_ahead(gradient)
        if gradient.rng is None:
            seed_torch(gradient.seed)
        batch = self._source.batch(gradient.rank, gradient.k, gradient.number)
        if gradient.rng is not None:
            torch.set_rng_state(gradient.rng)
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        loss = self._loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigurationError(
                f"loss: gave {type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}; must give one number "
                "as a tensor, such as a mean over the batch"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        return {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}

    def _context(self, gradient: Gradient, gate: Gate, view: ServerView) -> GateContext:
        needs = gate.needs
        rates = self._rates(gradient)
        by_name = {self._names[i]: rate for rate, members in zip(rates, self._members, strict=True) for i in members}
        return GateContext(
            rank=gradient.rank,
            staleness=view.version - gradient.versions[0],
            concurrency=self.ranks,
            pushes_per_version=view.pushes_per_version,
            lr=rates[0] if len(set(rates)) == 1 else by_name,
            step=gradient.k,
            version=view.version,
            window=view.window,
            scale=view.scale,
            weights=self._current() if "weights" in needs else None,
            base_weights=self._base(gradient.versions) if "base_weights" in needs else None,
            evaluate=self._evaluate if "evaluate" in needs else None,
        )

    def _rates(self, gradient: Gradient) -> Sequence[float]:
        """Learning rate of each group."""
        if gradient.rates is None:
            return [group["lr"] * gradient.lr_factor for group in self._hyper]
        if len(gradient.rates) != len(self._hyper):
            raise ConfigurationError(
                f"optimizer: has {len(self._hyper)} groups, the recorded one had {len(gradient.rates)}; give that one, "
                "or a schedule"
            )
        return gradient.rates

    def _current(self) -> dict[str, Tensor]:
        """The server's weights by name."""
        return self._named(self._state.weights()[1])

    def _named(self, buffer: Tensor) -> dict[str, Tensor]:
        views = self._layout.views(buffer)
        return {n: v.to(p.device) for n, v, p in zip(self._names, views, self._parameters, strict=True)}

    def _base(self, versions: Sequence[int]) -> dict[str, Tensor]:
        """Weights by name, each block's of the version that it was read at."""
        if len(set(versions)) == 1:
            return self._named(self.versions.weights(versions[0]))
        base: dict[str, Tensor] = {}
        for version, members in zip(versions, self._groups, strict=True):
            named = self._named(self.versions.weights(version))
            base.update({self._names[i]: named[self._names[i]] for i in members})
        return base

    def _load(self, versions: tuple[int, ...]) -> None:
        if versions == self._loaded:
            return
        with torch.no_grad():
            for version, members in zip(versions, self._groups, strict=True):
                views = self._layout.views(self.versions.weights(version))
                torch._foreach_copy_([self._parameters[i] for i in members], [views[i] for i in members])
        self._loaded = versions

    def _look_ahead(self, gradient: Gradient) -> None:
        """Load what the gate makes of the weights that were read, if anything."""
        gate = self.gate(gradient.rank)
        if type(gate).look_ahead is Gate.look_ahead:
            return
        base = self._base(gradient.versions)
        ahead = gate.look_ahead(base, gradient.versions[0])
        if ahead is not base:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self._parameters), [ahead[name] for name in self._names])
            self._loaded = ()

    def _flattened(self, packet: PushPacket, routed: Mapping[int, Tensor]) -> Tensor | None:
        if packet.rejected:
            return None
        wire = self._layout.of_gradients(packet.present, packet.sparse) if packet.sparse else self._layout
        buffer = wire.allocate(None if packet.sparse else packet.present)
        flatten_gradients(self._layout, list(routed.values()), packet.present, packet.sparse, buffer)
        return buffer

    def _note(self, packet: PushPacket, receipt: PushReceipt, time: float) -> None:
        arrivals = self.arrivals
        if receipt.buffered or receipt.waits:
            self._open[packet.key] = self.count
        arrivals.staleness.append(receipt.staleness)
        arrivals.energy.append(packet.energy)
        arrivals.weight.append(0.0 if packet.rejected else packet.weight)
        arrivals.time.append(time)
        arrivals.rank.append(packet.rank)
        arrivals.rejected.append(packet.rejected)
        arrivals.late.append(receipt.late)
        arrivals.version.append(receipt.version)
        arrivals.rounds.append(self._state.rounds)

    def _evaluate(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Loss of the next evaluation batch under given weights."""
        batches = self._source.evaluation()
        batch = batches[self._evaluations % len(batches)]
        self._evaluations += 1
        self.model.eval()
        loss: Tensor = functional_call(
            _Evaluated(self.model, self._loss), {f"model.{name}": weight for name, weight in weights.items()}, (batch,)
        )
        return loss


class _Evaluated(nn.Module):
    """A loss as a module, so that its weights can be exchanged."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def gradient_seed(seed: int, rank: int, k: int) -> int:
    """Seed of the randomness of a rank's k-th gradient: a 63-bit hash."""
    digest = hashlib.blake2b(f"{seed}\x1f{rank}\x1f{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
