"""What a forward thread's copy of the module shares with it, and what not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner
from lightning_g2.decoupled.clone import ModuleClone
from lightning_g2.decoupled.layer import Layout
from lightning_g2.errors import ConfigurationError


class Odd(nn.Module):
    """Keeps parameters and modules in unregistered places, and two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight  # tied
        self.cell = nn.GRU(2, 2, batch_first=True)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.aliases = [self.first, {"again": self.second}]
        self.pair = (self.first, 3)
        self.call = self.helper
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("absent", None)

    def helper(self, x: Tensor) -> Tensor:
        return self.aliases[1]["again"](self.pair[0](x)) * self.extra[0]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.replaced = self.replaced + 1
        self.seen = x.shape
        return self.cell(self.call(x)[None])[0].sum()


def _leaves(layout: Layout) -> list[nn.Parameter]:
    return [nn.Parameter(p.data) for p in layout.parameters]


def test_all_gradients_go_to_the_leaves():
    torch.manual_seed(0)
    module = Odd()
    layout = Layout.of(module)
    visited: list[int] = []
    clone = ModuleClone(module, layout, visited.append)
    leaves = _leaves(layout)
    clone.refresh(leaves)
    clone.module(torch.randn(3, 2)).backward()
    assert all(p.grad is None for p in module.parameters())
    module(torch.randn(3, 2))
    assert {name for name, leaf in zip(layout.names, leaves, strict=True) if leaf.grad is None} == set()
    assert clone.module.first.weight is clone.module.second.weight
    assert [layout.layers[i].name for i in visited] == ["first", "second", "cell"]
    assert module.aliases[0] is module.first


def test_buffers_attributes_and_hooks():
    module = Odd()
    layout = Layout.of(module)
    calls: list[nn.Module] = []
    module.first.register_forward_hook(lambda m, i, o: calls.append(m))
    clone = ModuleClone(module, layout, lambda layer: None)
    for _ in range(2):
        clone.refresh(_leaves(layout))
        clone.module(torch.randn(3, 2))
        clone.settle()
    assert (module.count, module.replaced, module.absent) == (2, 2, None)
    assert not hasattr(module, "seen")
    clone.give_back()
    assert module.seen == (3, 2)
    assert calls == [clone.module.first] * 2
    assert not module.first._forward_pre_hooks
    assert module.first.weight is layout.parameters[0]


def test_what_other_code_sets_on_the_module_is_seen_by_the_next_batch():
    module = Odd()
    layout = Layout.of(module)
    clone = ModuleClone(module, layout, lambda layer: None)
    module.first.eval()
    module.temperature = 3
    module.pair = (module.second, 4)
    clone.refresh(_leaves(layout))
    assert (clone.module.first.training, clone.module.second.training, clone.module.temperature) == (False, True, 3)
    assert clone.module.pair[0] is clone.module.second
    clone.module.temperature = 5  # by the pass itself
    clone.refresh(_leaves(layout))
    assert clone.module.temperature == 5
    clone.give_back()
    assert module.temperature == 5


def test_leaves_share_storage_and_have_a_version_of_their_own():
    weight = nn.Parameter(torch.ones(2))
    leaf = nn.Parameter(weight.data)
    loss = (leaf * leaf).sum()
    with torch.no_grad():
        weight.add_(1)
    loss.backward()
    assert torch.equal(leaf.grad, torch.full((2,), 4.0))


def test_layers_are_the_modules_that_hold_parameters():
    layout = Layout.of(Odd())
    assert [layer.name for layer in layout.layers] == ["first", "second", "cell", "extra"]
    assert layout.layers[1].parameters == (2,)  # its weight belongs to the first
    with pytest.raises(ConfigurationError, match="no parameters"):
        Layout.of(nn.ReLU())
    with pytest.raises(ConfigurationError, match="run one batch"):
        Layout.of(nn.LazyLinear(2))


def _run(module: nn.Module, batches: int = 3, **options) -> None:
    with DecoupledRunner(module, lambda m, x: m(x).sum(), lambda update: None, DecoupledOptions(**options)) as runner:
        for _ in range(batches):
            runner.submit(torch.ones(2, 2))


def test_modules_that_cannot_be_copied_are_refused():
    with pytest.raises(ConfigurationError, match="compiled or scripted"):
        _run(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    with pytest.raises(ConfigurationError, match="compiled in place"):
        _run(nn.Sequential(compiled))


def test_a_forward_that_goes_past_the_copy_is_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.forward = partial(nn.Sequential.forward, module)
    with pytest.raises(ConfigurationError, match="past the thread's copy"):
        _run(module)


class Counter(nn.Module):
    """Keeps a count in a plain attribute, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x


def test_shared_modules_are_used_as_they_are():
    module = nn.Sequential(nn.Linear(2, 2), Counter())
    counter = module[1]
    with DecoupledRunner(module, lambda m, x: m(x).sum(), lambda update: None, shared=(Counter,)) as runner:
        for _ in range(4):
            runner.submit(torch.ones(3, 2))
        runner.drain()
        assert counter.seen == 12


def test_batch_statistics_of_several_threads_stay_sound():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with DecoupledRunner(
        module,
        lambda m, x: m(x).square().mean(),
        lambda update: None,
        DecoupledOptions(forward_threads=4, backward_threads=2),
    ) as runner:
        for _ in range(60):
            runner.submit(torch.randn(16, 2))
    norm = module[1]
    assert 0 < norm.num_batches_tracked <= 60
    hidden = module[0](torch.randn(4000, 2))
    torch.testing.assert_close(norm.running_mean, hidden.mean(0), atol=0.3, rtol=0)
    torch.testing.assert_close(norm.running_var, hidden.var(0), atol=0.3, rtol=0.5)


def test_frozen_and_unused_parameters_do_not_move_and_cause_no_wait():
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1), "frozen": nn.Linear(2, 2)})
    module["frozen"].requires_grad_(False)
    seen: list[str] = []
    with DecoupledRunner(
        module,
        lambda m, x: m["used"](m["frozen"](x)).sum(),
        lambda update: seen.extend(update.gradients),
        DecoupledOptions(accumulate=2),
    ) as runner:
        for _ in range(4):
            runner.submit(torch.ones(2, 2))
    assert seen == ["used.weight", "used.bias"] * 2
