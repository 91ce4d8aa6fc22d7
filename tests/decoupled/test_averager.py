"""LAP-SGD's averager: replicas come together, and nothing that happens meanwhile is lost."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.decoupled import DecoupledOptions, DecoupledRunner, LocalApply
from lightning_g2.decoupled.averager import Averager, MeanOfThreads, lap_rounds


def test_rounds_thin_out_after_half_of_the_training():
    assert lap_rounds(8) == [1, 2, 3, 4]
    assert lap_rounds(80) == [*range(1, 41), 56, 72]


def test_what_others_update_during_a_round_stays():
    weight = nn.Parameter(torch.zeros(3))

    def mean(snapshot: Tensor) -> Tensor:
        weight.data.add_(5.0)  # a concurrent update
        snapshot.add_(1.0)  # the mean with a replica at 2
        return snapshot

    Averager([weight], mean, []).average()
    assert torch.equal(weight.data, torch.full((3,), 6.0))


def test_replicas_end_at_the_mean_of_all_updates():
    """Gradients of one at rates of their own: the sum over the replicas is that of all updates, at any interleaving."""
    batches, rates = 20, [1.0, 2.0, 4.0]
    nets = [nn.Linear(2, 2, bias=False) for _ in rates]
    for net in nets:
        nn.init.zeros_(net.weight)
    mean = MeanOfThreads(len(nets))
    errors: list[BaseException] = []

    def train(net: nn.Module, rate: float) -> None:
        options = DecoupledOptions(forward_threads=2, backward_threads=0, update="block", private_state=True)
        apply = LocalApply(torch.optim.SGD(net.parameters(), lr=rate), dict(net.named_parameters()), options)
        try:
            with Averager(list(net.parameters()), mean, [*lap_rounds(batches), batches]) as averager:
                runner = DecoupledRunner(
                    net, lambda m, x: m(x).sum(), apply, options, after_batch=lambda *_: averager.batch_through()
                )
                with runner:
                    for _ in range(batches):
                        runner.submit(torch.ones(1, 2))
        except BaseException as error:
            errors.append(error)
            mean.abort()

    threads = [threading.Thread(target=train, args=pair) for pair in zip(nets, rates, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    for net in nets:
        torch.testing.assert_close(net.weight.data, torch.full((2, 2), -batches * sum(rates) / len(rates)))


def test_a_replica_that_gives_up_ends_the_others():
    mean = MeanOfThreads(2)
    averager = Averager([nn.Parameter(torch.zeros(1))], mean, [1])

    def train() -> None:
        with averager:
            averager.batch_through()
            mean.abort()

    with pytest.raises(threading.BrokenBarrierError):
        train()
    assert not averager._thread.is_alive()
