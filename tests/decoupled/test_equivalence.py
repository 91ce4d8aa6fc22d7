"""One thread of each kind, taking turns, is plain training bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, LocalApply
from lightning_g2.errors import ConfigurationError
from lightning_g2.tasks.gpt import ByteGPT

TURNS = {"forward_threads": 1, "backward_threads": 1, "max_graphs": 1}
Batch = tuple[Tensor, Tensor]


class Conv(nn.Module):
    """Convolution, batch normalisation, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
        self.head = nn.Linear(4 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)))


class Recurrent(nn.Module):
    """An LSTM that carries its state from batch to batch in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.cell(x.view(-1, 8, 8), self.state)
        self.state = (state[0].detach(), state[1].detach())
        return self.head(output[:, -1])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


def _batches(count: int = 7) -> Iterator[Batch]:
    """Drawn one by one from the process's generator, as a loader without workers draws its augmentation."""
    for _ in range(count):
        yield torch.randn(6, 64), torch.randint(4, (6,))


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def _setup(build: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]):
    torch.manual_seed(3)
    module = build()
    step = optimizer(module.parameters())
    return module, step, torch.optim.lr_scheduler.StepLR(step, 2, 0.5)


def _plain(build, optimizer, *, accumulate=1, clip: Callable[[nn.Module], None] | None = None):
    module, step, schedule = _setup(build, optimizer)
    batches = list(enumerate(_batches(), 1)) if accumulate > 1 else enumerate(_batches(), 1)
    last = 7
    for number, batch in batches:
        (_loss(module, batch) / accumulate).backward()
        if number % accumulate == 0 or number == last:
            if clip is not None:
                clip(module)
            step.step()
            step.zero_grad()
            schedule.step()
    return module, step


def _decoupled(build, optimizer, **options):
    options = DecoupledOptions(**{**TURNS, **options})
    module, step, schedule = _setup(build, optimizer)
    apply = LocalApply(step, dict(module.named_parameters()), options)
    batches = list(_batches()) if options.accumulate > 1 else _batches()

    def after(number: int, loss: Tensor | None, stepped: bool) -> None:
        if stepped:
            schedule.step()

    with DecoupledRunner(module, _loss, apply, options, after_batch=after) as runner:
        for batch in batches:
            runner.submit(batch)
    assert runner.report.batches == 7
    assert runner.report.peak_graphs == 1
    return module, step


def _assert_same(one, other) -> None:
    (module, step), (expected, expected_step) = one, other
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    state, expected_state = step.state_dict(), expected_step.state_dict()
    assert state["param_groups"] == expected_state["param_groups"]
    assert state["state"].keys() == expected_state["state"].keys()
    for key, values in expected_state["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][key][name]), torch.as_tensor(value)), (key, name)


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("weights", ["stashed", "current"])
@pytest.mark.parametrize("optimizer", [_sgd, _momentum, _adamw])
def test_layer_by_layer_is_plain_training(optimizer, weights):
    _assert_same(_decoupled(_mlp, optimizer, weights=weights), _plain(_mlp, optimizer))


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "NAdam", "Adadelta", "Adamax", "RAdam", "Rprop", "ASGD"])
def test_any_optimizer_of_single_parameters(name):
    def build(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01)

    _assert_same(_decoupled(_mlp, build), _plain(_mlp, build))


@pytest.mark.parametrize("options", [{"update": "block"}, {"backward_threads": 0}], ids=["block", "one-thread"])
def test_other_arrangements_of_one_batch_at_a_time(options):
    _assert_same(_decoupled(_mlp, _adamw, **options), _plain(_mlp, _adamw))


@pytest.mark.parametrize("build", [Conv, Recurrent])
def test_side_effects_of_the_forward_pass(build):
    """Batch statistics, dropout's draws among the data's, and state carried from batch to batch."""
    one, other = _decoupled(build, _adamw), _plain(build, _adamw)
    _assert_same(one, other)
    if build is Recurrent:
        assert torch.equal(one[0].state[0], other[0].state[0])  # the module has it back


@pytest.mark.parametrize("update", ["layer", "block"])
def test_accumulation_with_an_incomplete_last_window(update):
    plain = _plain(_mlp, _momentum, accumulate=3)
    _assert_same(_decoupled(_mlp, _momentum, accumulate=3, update=update), plain)


def test_clipping_of_the_whole_and_of_each_layer():
    whole = _plain(_mlp, _sgd, clip=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    _assert_same(_decoupled(_mlp, _sgd, update="block", clip_norm=0.1, clip_scope="global"), whole)

    def each(module: nn.Module) -> None:
        for layer in module:
            if list(layer.parameters()):
                nn.utils.clip_grad_norm_(layer.parameters(), 0.1)

    layers = _plain(_mlp, _sgd, clip=each)
    _assert_same(_decoupled(_mlp, _sgd, clip_norm=0.1), layers)
    _assert_same(_decoupled(_mlp, _sgd, clip_norm=0.1, update="block"), layers)
    values = _plain(_mlp, _sgd, clip=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01))
    _assert_same(_decoupled(_mlp, _sgd, clip_value=0.01), values)
    assert not torch.equal(values[0][0].weight, layers[0][0].weight)


class Checkpointed(nn.Module):
    """Runs its body again in the backward pass."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.clone().requires_grad_()
        return self.head(checkpoint(self.body, inputs, use_reentrant=self.reentrant))


def test_activation_checkpointing_needs_turns(monkeypatch):
    _assert_same(_decoupled(Checkpointed, _adamw), _plain(Checkpointed, _adamw))
    with pytest.raises(ConfigurationError, match="set max_graphs=1"):
        _decoupled(Checkpointed, _adamw, max_graphs=2)
    monkeypatch.setattr(Checkpointed, "reentrant", True)
    with pytest.raises(ConfigurationError, match="past the thread's copy"):
        _decoupled(Checkpointed, _adamw)


def test_autocast_within_the_loss():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _loss(module, batch)

    results = []
    for threaded in (False, True):
        module, step, _ = _setup(build, _adamw)
        options = DecoupledOptions(**TURNS)
        if threaded:
            with DecoupledRunner(
                module, loss, LocalApply(step, dict(module.named_parameters()), options), options
            ) as runner:
                for batch in _batches():
                    runner.submit(batch)
        else:
            for batch in _batches():
                step.zero_grad()
                loss(module, batch).backward()
                step.step()
        results.append((module, step))
    _assert_same(results[1], results[0])


def test_a_transformer_with_tied_weights():
    def build() -> ByteGPT:
        torch.manual_seed(0)
        return ByteGPT(width=16, layers=2, heads=2, block_size=8)

    tokens = torch.randint(256, (4, 2, 9), generator=torch.Generator().manual_seed(1))
    plain, threaded = build(), build()
    step = _adamw(plain.parameters())
    for batch in tokens:
        step.zero_grad()
        plain.loss(batch).backward()
        step.step()
    options = DecoupledOptions(**TURNS)
    other = _adamw(threaded.parameters())
    with DecoupledRunner(
        threaded, lambda m, b: m.loss(b), LocalApply(other, dict(threaded.named_parameters()), options), options
    ) as runner:
        for batch in tokens:
            runner.submit(batch)
    _assert_same((threaded, other), (plain, step))
