"""Options and optimizers that are refused, and the gate within the updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, LocalApply, TurnScheduler
from lightning_g2.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"forward_threads": 0}, "forward_threads=0: must be an integer ≥ 1"),
        ({"backward_threads": -1}, "backward_threads=-1: must be an integer ≥ 0"),
        ({"max_graphs": 0}, "max_graphs=0: must be an integer ≥ 1"),
        ({"weights": "old"}, "weights='old': must be one of 'current', 'stashed'"),
        ({"update": "tensor"}, "update='tensor': must be one of"),
        ({"clip_norm": 0.0}, r"clip_norm=0.0: must be > 0"),
        ({"clip_norm": 1.0, "clip_scope": "global"}, "clip with clip_scope='layer', or .* update='block'"),
        ({"correction": "pipemare", "weights": "stashed"}, "use weights='current'"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ConfigurationError, match=match):
        DecoupledOptions(**options)


def test_optimizers_that_couple_parameters_are_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="optimizer LBFGS"):
        LocalApply(torch.optim.LBFGS(net.parameters()), dict(net.named_parameters()), DecoupledOptions())

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    apply = LocalApply(Counting(net.parameters(), lr=0.1), dict(net.named_parameters()), DecoupledOptions())
    with pytest.raises(ConfigurationError, match="step changes 'steps' of a parameter group"):
        _run(net, apply, 1)


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def _run(net: nn.Module, apply, batches: int, scheduler=None, **options) -> DecoupledRunner:
    generator = torch.Generator().manual_seed(0)
    width = next(net.parameters()).shape[1]
    with DecoupledRunner(net, _loss, apply, DecoupledOptions(**options), scheduler=scheduler) as runner:
        for _ in range(batches):
            runner.submit(torch.randn(4, width, generator=generator))
    return runner


def test_groups_keep_their_own_hyper_parameters_and_schedules_act():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = [p.detach().clone() for p in net.parameters()]
    groups = [{"params": net[0].parameters(), "lr": 0.0}, {"params": [net[1].weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    apply = LocalApply(optimizer, dict(net.named_parameters()), DecoupledOptions())
    _run(net, apply, 3)
    moved = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    assert moved == [False, False, True, False]  # the last is not the optimizer's
    optimizer.param_groups[1]["lr"] = 0.0
    optimizer.add_param_group({"params": [net[1].bias], "lr": 0.1})
    held = net[1].weight.detach().clone()
    _run(net, apply, 3)
    assert torch.equal(net[1].weight, held)
    assert not torch.equal(net[1].bias, before[3])


def _gated(gate: str | None, **gate_options) -> tuple[nn.Module, LocalApply]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = DecoupledOptions(backward_threads=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    apply = LocalApply(optimizer, dict(net.named_parameters()), options, gate=gate, gate_options=gate_options)
    _run(net, apply, 40, TurnScheduler(lambda which, layer: 1.0 if which == "forward" else 2.0), backward_threads=3)
    return net, apply


def test_the_gate_filters_stale_gradients_of_each_block():
    plain, _ = _gated(None)
    untouched, _ = _gated("g2", beta=0.0)
    gated, _ = _gated("g2", beta=32.0)
    assert torch.equal(untouched[0].weight, plain[0].weight)  # β = 0 turns it off
    assert not torch.equal(gated[0].weight, plain[0].weight)
    assert gated[0].weight.isfinite().all()


def test_a_gate_refuses_nan_and_is_checked_at_once():
    net = nn.Linear(2, 2)
    before = net.weight.detach().clone()
    apply = LocalApply(
        torch.optim.SGD(net.parameters(), lr=0.1), dict(net.named_parameters()), DecoupledOptions(), gate="none"
    )
    with DecoupledRunner(net, lambda m, x: m(x).sum() * float("nan"), apply) as runner:
        runner.submit(torch.ones(1, 2))
    assert torch.equal(net.weight, before)
    assert apply.rejected == 1
    with pytest.raises(ConfigurationError, match="beta"):
        LocalApply(torch.optim.SGD(net.parameters()), {}, DecoupledOptions(), gate="g2", gate_options={"beta": -1.0})


def test_first_steps_of_one_layer_by_several_threads_make_its_state_once():
    """However the threads interleave: every layer has 200 versions, every parameter one whole state, all finite."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.002)
    apply = LocalApply(optimizer, dict(net.named_parameters()), DecoupledOptions())
    x = torch.randn(64, 4)
    with DecoupledRunner(net, _loss, apply, DecoupledOptions(forward_threads=4, backward_threads=4)) as runner:
        for _ in range(200):
            runner.submit(x)
    assert runner.report.batches == 200
    assert [sum(ages.values()) for ages in runner.report.ages().values()] == [200, 200]
    assert optimizer.state.keys() == set(net.parameters())
    for parameter, old in zip(net.parameters(), before, strict=True):
        state = optimizer.state[parameter]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert 0 < state["step"] <= 200  # two threads may count as one: no lock is on state
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)
