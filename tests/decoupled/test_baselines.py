"""Other arrangements by the same threads: private momentum (LAP-SGD), updates of a block alone (LPP-SGD)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, GradientUpdate, LocalApply, TurnScheduler
from lightning_g2.decoupled.layer import Layout
from lightning_g2.errors import ConfigurationError


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def _run(net: nn.Module, apply, options: DecoupledOptions, batches: int) -> None:
    scheduler = TurnScheduler(lambda which, layer: 1.0)
    with DecoupledRunner(net, _loss, apply, options, scheduler=scheduler) as runner:
        for number in range(batches):
            runner.submit(torch.full((2, 4), 1.0 + number))


def test_blocks_are_contiguous_and_cover_all():
    layout = Layout.of(_net())
    for count in (1, 2, 3, 6, 9):
        blocks = [layout.block(index, count) for index in range(count)]
        assert [number for block in blocks for number in block] == list(range(6))
    assert [len(layout.block(index, 3)) for index in range(3)] == [2, 2, 2]


def test_every_other_batch_updates_the_own_block_alone():
    net, updates = _net(), list[GradientUpdate]()
    options = DecoupledOptions(backward_threads=0, update="block", own_block=(1, 3), own_block_after=2)
    _run(net, updates.append, options, 6)
    everything = tuple(name for name, _ in net.named_parameters())
    # two batches of the warm phase, then in turn
    assert [tuple(u.gradients) for u in updates] == [
        everything, everything, everything, ("1.weight", "1.bias"), everything, ("1.weight", "1.bias"),
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"own_block=\(3, 3\): must be \(i, n\)"):
        DecoupledOptions(own_block=(3, 3))


def test_private_momentum_is_each_threads_own():
    """Two threads in strict turns: each one's momentum holds its own gradients and no other's."""
    net = _net()
    chosen = DecoupledOptions(forward_threads=2, backward_threads=0, update="block", private_state=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    local = LocalApply(optimizer, dict(net.named_parameters()), chosen)
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    momentum: dict[tuple[int, str], Tensor] = {}

    def apply(update: GradientUpdate) -> None:
        for name, gradient in update.gradients.items():
            kept = momentum.get((update.lane, name))
            momentum[update.lane, name] = gradient.clone() if kept is None else 0.9 * kept + gradient
            expected[name] -= 0.1 * momentum[update.lane, name]
        local(update)

    _run(net, apply, chosen, 8)
    assert {lane for lane, _ in momentum} == {0, 1}
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name])
    assert not optimizer.state
