"""Loss of a small regression after 768 steps, by outer step, ranks, local steps and inner learning rate.

Ranks take turns in one process: real module, optimizers, client and server, no time and no gate. Prints one line for
each row of the table in docs/decisions/2026-11-30-local-steps.md: ``python tests/scripts/outer_steps.py RANKS...``
"""

import sys
from statistics import mean

import torch

from lightning_g2.server import OuterStep
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.local_steps import LocalStep, LocalSteps
from lightning_g2.transport import LocalTransport, ServerHost
from lightning_g2.values import GateDecision

EPOCHS, RATES = 24, (0.001, 0.003, 0.01, 0.03)


class Rank:
    def __init__(self, host: ServerHost, rank: int, ranks: int, lr: float, every: int, outer: OuterStep) -> None:
        self.module, self.x, self.y = problem()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.client = RankClient(
            LocalTransport(host, rank), rank=rank, ranks=ranks, named_parameters=self.module.named_parameters,
            optimizers=[self.optimizer], prefetch=False, outer=outer,
        )  # fmt: skip
        self.local = self.client.local = LocalSteps(every, self.push)
        if rank == 0:
            self.client.configure()
        self.client.begin()
        LocalStep(self.optimizer, 0, self.local, lambda: True).install()

    def push(self, steps: int, samples: int) -> None:
        def route(gradients, view, staleness):
            return GateDecision(gradients)

        self.client.push_difference(route, steps=steps, samples=samples, needs_view=False)

    def train(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss(self.module, self.x[batch], self.y[batch]).backward()
        self.optimizer.step()
        self.local.close_window(len(batch))


def problem() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x = torch.randn(512, 4)
    return module, x, x.prod(1, keepdim=True).tanh() + x.sum(1, keepdim=True).sin()


def loss(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(module(x), y)


def run(ranks: int, every: int, outer: OuterStep, lr: float, seed: int) -> float:
    """Each batch goes to a rank at random, the first twice as often; ranks meet at epoch ends."""
    host = ServerHost(ranks)
    all_ranks = [Rank(host, rank, ranks, lr, every, outer) for rank in range(ranks)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(512, generator=generator).split(16):
            turn = int(torch.randint(ranks + 1, (), generator=generator)) % ranks
            all_ranks[turn].train(batch)
        for rank in all_ranks:
            rank.client.settle()
    first = all_ranks[0]
    first.client.load(first.client.transport.pull())
    return loss(first.module, first.x, first.y).item()


if __name__ == "__main__":
    for ranks in map(int, sys.argv[1:]):
        outers = {
            "nesterov 0.7 0.9": OuterStep(name="nesterov"),
            "delayed_nesterov 0.7 0.9": OuterStep(delay=ranks),
            "delayed_nesterov 0.7 0.5": OuterStep(delay=ranks, momentum=0.5),
            "delayed_nesterov 1.0 0.0": OuterStep(delay=ranks, lr=1.0, momentum=0.0),
        }
        for every in (4, 16):
            for name, outer in outers.items():
                losses = {lr: [run(ranks, every, outer, lr, seed) for seed in range(3)] for lr in RATES}
                cells = (f"{lr}: {mean(values):.3f} ({max(values):.3f})" for lr, values in losses.items())
                print(f"{ranks} ranks, H={every}, {name}: {', '.join(cells)}", flush=True)
