"""Rules beside g2 in the protocol of real runs: what a rank has to fetch for them, and what it sends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_g2 import G2RoutingCallback
from lightning_g2.errors import ConfigurationError
from lightning_g2.simulate import simulate, uniform
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.nonfinite import NonFiniteGradients
from lightning_g2.strategy.router import PushRouter
from lightning_g2.transport.host import ServerHost
from lightning_g2.transport.local import LocalTransport

RANKS, PUSHES, RATE = 3, 12, 0.3


def start() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 2)


def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :2]).square().mean()


BATCHES = [torch.randn(4, 5, generator=torch.Generator().manual_seed(i)) for i in range(4)]


class Rank:
    """A rank of a real run, over the in-process transport."""

    def __init__(self, host: ServerHost, rank: int, gate: str, *, prefetch: bool = False, optimizers: int = 1) -> None:
        self.model = start()
        split = [self.model.parameters()] if optimizers == 1 else [[self.model.weight], [self.model.bias]]
        self.client = RankClient(
            LocalTransport(host, rank),
            rank=rank,
            ranks=RANKS,
            named_parameters=self.model.named_parameters,
            optimizers=[torch.optim.SGD(parameters, lr=RATE, momentum=0.5) for parameters in split],
            prefetch=prefetch,
        )
        routing = G2RoutingCallback(gate)
        self.router = PushRouter(routing, self.client, NonFiniteGradients("stop", rank), rank=rank, ranks=RANKS)
        if rank == 0:
            self.client.configure()
        self.client.begin()

    def compute(self, batch: Tensor) -> None:
        self.model.zero_grad()
        loss(self.model, batch).backward()

    def push(self) -> None:
        route = partial(self.router.route, 0, 0)
        self.client.push(0, route, samples=4, needs_view=self.router.gate.needs_view)


@pytest.mark.parametrize("gate", ["none", "dc", "inverse", "cosine", "dana", "polynomial", "concurrency", "drop", "g2"])
def test_ranks_and_simulation_agree_bit_for_bit(gate: str) -> None:
    host = ServerHost(RANKS)
    ranks = [Rank(host, rank, gate) for rank in range(RANKS)]
    for number, rank in enumerate(ranks):
        rank.compute(BATCHES[number])
    for push in range(PUSHES):
        rank = ranks[push % RANKS]
        rank.push()
        rank.compute(BATCHES[(push + RANKS) % 4])
    _, weights = host.snapshot().version, host.pull().buffer
    simulated = simulate(
        start(), loss, BATCHES, ranks=RANKS, pushes=PUSHES, gate=gate, delays=uniform(), seed=0, lr=RATE,
        optimizer=partial(torch.optim.SGD, momentum=0.5),
    )  # fmt: skip
    for view, expected in zip(host.layout().views(weights), simulated.weights.values(), strict=True):
        assert torch.equal(view, expected)


@pytest.mark.parametrize("prefetch", [False, True])
def test_dc_compares_the_base_with_the_servers_weights(prefetch: bool) -> None:
    host = ServerHost(RANKS)
    one, other = (Rank(host, rank, "dc", prefetch=prefetch) for rank in range(2))
    seen: list[tuple[Tensor, Tensor]] = []
    decide = one.router.gate.decide

    def spy(gradients, context):
        seen.append((context.base_weights["weight"].clone(), context.weights["weight"].clone()))
        return decide(gradients, context)

    one.router.gate.decide = spy  # type: ignore[method-assign]
    then = one.model.weight.detach().clone()
    one.compute(BATCHES[0])
    one.push()  # under prefetch the reply is loaded at the next push, over the base of the gradient below
    one.compute(BATCHES[1])
    base = one.model.weight.detach().clone()
    other.compute(BATCHES[2])
    other.push()
    now = host.layout().views(host.pull().buffer)[0].clone()
    one.push()
    assert torch.equal(seen[0][0], then)
    assert torch.equal(seen[1][0], base)
    assert torch.equal(seen[1][1], now)
    assert not torch.equal(base, now)


def test_base_weights_of_several_optimizers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a gate that needs base weights, with 2 optimizers"):
        Rank(ServerHost(RANKS), 0, "dc", optimizers=2)
