"""Whatever happens, the error is the caller's and every thread has ended."""

from __future__ import annotations

import os
import signal
import threading
import traceback

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, LocalApply
from lightning_g2.errors import ConfigurationError

THREADS = {"forward_threads": 3, "backward_threads": 2}


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class InjectedError(RuntimeError):
    """Raised by the tests."""


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise InjectedError("in the backward pass")


def _runner(loss, **options) -> DecoupledRunner:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    chosen = DecoupledOptions(**{**THREADS, **options})
    apply = LocalApply(torch.optim.SGD(net.parameters(), lr=0.1), dict(net.named_parameters()), chosen)
    return DecoupledRunner(net, loss, apply, chosen)


def _feed(runner: DecoupledRunner, batches: int = 50) -> None:
    with runner:
        for number in range(batches):
            runner.submit(number)


def _forward_fails(module: nn.Module, number: int) -> Tensor:
    if number == 7:
        raise InjectedError("in the forward pass")
    return module(torch.ones(1, 2)).sum()


def _backward_fails(module: nn.Module, number: int) -> Tensor:
    y = module[1](module[0](torch.ones(1, 2)))
    return (_FailsBackward.apply(y) if number == 7 else y).sum()


def _set_when_noted(runner: DecoupledRunner, event: threading.Event) -> None:
    note = runner._guard

    def guard(loop, lane):
        note(loop, lane)
        event.set()

    runner._guard = guard


@pytest.mark.parametrize("loss", [_forward_fails, _backward_fails])
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_an_error_comes_with_its_threads_traceback(loss, limit):
    """Later batches are held in their forward pass until the error has been noted: none of them is trained on."""
    noted = threading.Event()

    def held(module: nn.Module, number: int) -> Tensor:
        assert number <= 7 or noted.wait(60)
        return loss(module, number)

    runner = _runner(held, max_graphs=limit)
    _set_when_noted(runner, noted)
    with pytest.raises(InjectedError, match="in the") as caught:
        _feed(runner)
    text = "".join(traceback.format_exception(caught.value))
    assert ("_forward_fails" if loss is _forward_fails else "in backward") in text
    assert runner.report.batches <= 7
    if hasattr(caught.value, "__notes__"):
        assert any("thread" in note for note in caught.value.__notes__)


def test_a_backward_that_fails_frees_forwards_that_wait():
    """All forward threads are in their pass or waiting for work, and the caller waits for room, when it happens."""
    gate = threading.Event()

    def loss(module: nn.Module, number: int) -> Tensor:
        if number:
            gate.wait(60)
        y = module(torch.ones(1, 2))
        return (y if number else _FailsBackward.apply(y)).sum()

    runner = _runner(loss, backward_threads=1, max_graphs=4)
    _set_when_noted(runner, gate)
    with pytest.raises(InjectedError, match="backward"):
        _feed(runner)


def test_an_error_of_the_last_batch_comes_at_the_end():
    def loss(module: nn.Module, number: int) -> Tensor:
        if number == 2:
            raise InjectedError("late")
        return module(torch.ones(1, 2)).sum()

    with pytest.raises(InjectedError, match="late"):
        _feed(_runner(loss), batches=3)


@pytest.mark.parametrize("where", ["apply", "after_batch"])
def test_an_error_in_the_update_or_after_the_batch(where):
    def fail(*_: object) -> None:
        raise InjectedError("in the update")

    hooks = {"apply": lambda update: None, where: fail}
    runner = DecoupledRunner(nn.Linear(2, 1), lambda m, n: m(torch.ones(1, 2)).sum(), **hooks)
    with pytest.raises(InjectedError, match="in the update"):
        _feed(runner, 5)


def test_the_callers_own_error_wins():
    runner = _runner(lambda m, n: m(torch.ones(1, 2)).sum())

    def feed() -> None:
        with runner:
            runner.submit(0)
            raise InjectedError("mine")

    with pytest.raises(InjectedError, match="mine"):
        feed()


def test_keyboard_interrupt_while_the_caller_waits():
    """The signal comes when the queue is full and both threads are held: the caller cannot be anywhere else."""
    release = threading.Event()
    sent = threading.Event()

    def loss(module: nn.Module, number: int) -> Tensor:
        if number == 1 and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        if number:
            release.wait(0.2)
        return module(torch.ones(1, 2)).sum()

    runner = _runner(loss, forward_threads=1, backward_threads=1, max_graphs=2)
    with pytest.raises(KeyboardInterrupt):
        _feed(runner)
    assert sent.is_set()
    assert runner.report.batches < 50


def test_it_can_be_entered_again_after_an_error_and_after_a_normal_end():
    fail = [True]

    def loss(module: nn.Module, number: int) -> Tensor:
        if fail[0] and number == 2:
            raise InjectedError("once")
        return module(torch.ones(1, 2)).sum()

    runner = _runner(loss)
    with pytest.raises(InjectedError, match="once"):
        _feed(runner, 10)
    fail[0] = False
    before = runner.report.batches
    _feed(runner, 10)
    _feed(runner, 10)
    assert runner.report.batches == before + 20


def test_submit_needs_threads():
    with pytest.raises(ConfigurationError, match="enter the runner first"):
        _runner(_forward_fails).submit(0)


def test_what_a_training_step_may_return():
    outputs = {0: None, 1: "loss", 2: "dict"}

    def loss(module: nn.Module, number: int):
        value = module(torch.ones(1, 2)).sum()
        return {None: None, "loss": value, "dict": {"loss": value, "more": 1}}[outputs[number % 3]]

    runner = _runner(loss)
    _feed(runner, 9)
    assert (runner.report.batches, runner.report.skipped) == (9, 3)
    for wrong, match in ((3.0, "returned float"), (torch.ones(2, requires_grad=True), "scalar")):
        with pytest.raises(ConfigurationError, match=match):
            _feed(_runner(lambda m, n, wrong=wrong: wrong), 2)
