"""The server goes on without a rank: what others wait for ends, and what the rank still sends is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_g2.errors import DroppedError, PeerFailedError
from lightning_g2.server import Aggregation, OptimizerSpec, ParameterLayout, ServerSetup
from lightning_g2.transport import ServerHost
from lightning_g2.values import EpochPlan, PushPacket, TicketRequest


def _host(ranks: int = 3, **options: Any) -> tuple[ServerHost, ParameterLayout]:
    host = ServerHost(ranks, clock=lambda: 0.0)
    parameter = torch.nn.Parameter(torch.zeros(4))
    layout = ParameterLayout.of([("p", parameter.detach())])
    spec = OptimizerSpec.of(torch.optim.SGD([parameter], lr=1.0), {id(parameter): 0})
    host.configure(ServerSetup(layout, layout.allocate(), (spec,), ranks, **options))
    return host, layout


def _push(
    host: ServerHost, layout: ParameterLayout, rank: int, sequence: int, replies: list[Any], *, base: int = 0
) -> None:
    ones = layout.allocate()
    layout.views(ones)[0].fill_(1.0)
    packet = PushPacket(rank, 0, sequence, base_version=base, groups=({"lr": 1.0},), present=(0,))
    with torch.no_grad():
        host.push(packet, ones, replies.append)


def test_whoever_waits_for_a_dropped_rank_goes_on() -> None:
    host, _ = _host()
    met: dict[int, Any] = {}
    for rank in (0, 2):
        host.sync(rank, "epoch_end", lambda reply, rank=rank: met.update({rank: reply}))
    assert not met
    assert host.drop(1, "it has not been heard of")
    assert {rank: reply.release.participants for rank, reply in met.items()} == {0: (0, 2), 2: (0, 2)}
    assert met[0].release.together
    shares: list[Any] = []
    host.gather(0, "all_gather", torch.zeros(1, dtype=torch.uint8), shares.append)
    assert not shares
    assert host.drop(2, "its process has ended")
    assert list(shares[0].shares) == [0]
    assert host.dropped() == {1: "it has not been heard of", 2: "its process has ended"}
    assert host.live_ranks() == (0,)


def test_a_dropped_rank_is_refused_whatever_it_asks_and_harms_nobody() -> None:
    host, layout = _host()
    waiting: list[Any] = []
    host.sync(1, "epoch_end", waiting.append)
    host.drop(1, "it has not been heard of for 3 s")
    assert isinstance(waiting[0], DroppedError), "it may be but frozen"
    match = "rank 1 was dropped from the job, which goes on without it: it has not been heard of for 3 s"
    plan = EpochPlan(epoch=0, batches=4, shared=True)
    for ask in (
        lambda: host.sync(1, "epoch_end", waiting.append),
        lambda: host.ticket(1, TicketRequest(plan, 0), waiting.append),
        lambda: host.gather(1, "barrier", None, waiting.append),
        lambda: host.admit(1),
    ):
        with pytest.raises(DroppedError, match=match):
            ask()
    replies: list[Any] = []
    _push(host, layout, 1, 0, replies)
    assert isinstance(replies[0], DroppedError)
    assert match in str(replies[0])
    host.fail(1, "boom")  # its error is none of the job's
    host.check()
    _push(host, layout, 0, 0, replies)
    assert replies[1].receipt.version == 1
    assert host.drop(1, "again")


def test_without_rank_0_or_before_training_the_job_ends() -> None:
    host, _ = _host()
    assert not host.drop(0, "it has not been heard of for 3 s")
    with pytest.raises(PeerFailedError, match="rank 0 failed, so the job ends: it has not been heard of"):
        host.check()
    young = ServerHost(2)
    assert not young.drop(1, "its process has ended")
    with pytest.raises(PeerFailedError, match="rank 1 failed"):
        young.check()


def test_a_rank_that_has_left_in_order_is_not_dropped() -> None:
    host, _ = _host()
    host.leave(1)
    assert host.drop(1, "its process has ended")
    assert host.dropped() == {}


@pytest.mark.parametrize("aggregation", [Aggregation(aggregate=3), Aggregation(rounds=3)], ids=["aggregate", "rounds"])
def test_a_version_of_several_pushes_needs_only_those_of_live_ranks(aggregation: Aggregation) -> None:
    host, layout = _host(aggregation=aggregation)
    replies: list[Any] = []
    _push(host, layout, 0, 0, replies)
    _push(host, layout, 2, 0, replies)
    assert host.view().version == 0
    host.drop(1, "its process has ended")
    assert (host.view().version, host.view().pushes_per_version) == (1, 2)
    _push(host, layout, 0, 1, replies, base=1)
    _push(host, layout, 2, 1, replies, base=1)
    assert host.view().version == 2


def test_the_batch_of_a_rank_that_dies_last_is_trained_on_before_the_epoch_ends() -> None:
    host, layout = _host(2)
    plan = EpochPlan(epoch=0, batches=3, shared=True)
    tickets: dict[int, list[Any]] = {0: [], 1: []}
    for rank in (0, 1):
        host.ticket(rank, TicketRequest(plan, 0), tickets[rank].append)
    replies: list[Any] = []
    for step in (1, 2):
        _push(host, layout, 0, step - 1, replies)
        host.ticket(0, TicketRequest(plan, step, pushes=step), tickets[0].append)
    assert [ticket.numbers for ticket in tickets[0]] == [(0,), (2,)], "nothing is left, and yet the epoch goes on"
    host.drop(1, "its process has ended")
    assert tickets[0][2].numbers == (1,)
    _push(host, layout, 0, 2, replies)
    host.ticket(0, TicketRequest(plan, 3, pushes=3), tickets[0].append)
    assert tickets[0][3].point.ends_epoch
