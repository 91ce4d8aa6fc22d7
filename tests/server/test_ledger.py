"""What was trained on in an epoch, told by the conductor."""

from __future__ import annotations

import pytest

from lightning_g2.server import Conductor, fate_of
from lightning_g2.values import EpochCursor, EpochPlan, Fate, PushPacket, PushReceipt, TicketRequest


def _train(conductor: Conductor, plan: EpochPlan, rank: int, fates: list[Fate], *, first: int = 0) -> None:
    """A rank trains on as many batches as there are fates; it has asked for the first of them."""
    for step, fate in enumerate(fates, start=first):
        conductor.pushed((rank, 0, step), fate=fate, samples=4)
        conductor.request(rank, TicketRequest(plan, step + 1, pushes=step + 1))


@pytest.mark.parametrize(
    ("packet", "receipt", "fate"),
    [
        ({}, {}, "applied"),
        ({"weight": 0.5}, {}, "damped"),
        ({"rejected": True, "weight": 0.5}, {}, "rejected"),
        ({}, {"late": True}, "late"),
        ({}, {"buffered": True}, "applied"),
    ],
)
def test_the_fate_of_a_push(packet: dict, receipt: dict, fate: Fate) -> None:
    sent = PushPacket(0, 0, 0, base_version=0, **packet)
    assert fate_of(sent, PushReceipt(1, 0, applied=fate in ("applied", "damped"), **receipt)) == fate


def test_without_faults_each_batch_counts_once_and_its_fate_is_shown() -> None:
    conductor = Conductor([0])
    plan = EpochPlan(epoch=2, batches=5, shared=True)
    conductor.request(0, TicketRequest(plan, 0))
    _train(conductor, plan, 0, ["applied", "damped", "rejected", "applied"])
    conductor.request(0, TicketRequest(plan, 4, pushes=4))  # a step that pushed nothing
    record = conductor.record()
    assert record.exact
    assert (record.epoch, record.batches, record.once, record.missing) == (2, 5, 5, ())
    assert record.fates == {"applied": 2, "damped": 1, "rejected": 1, "skipped": 1}
    assert record.samples == {"applied": 8, "damped": 4, "rejected": 4}
    assert record.ranks == {0: 5}


def test_what_a_rank_has_left_is_named_and_missing_until_others_have_brought_it() -> None:
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=4, shared=True)
    for rank in (0, 1):
        conductor.request(rank, TicketRequest(plan, 0))
    _train(conductor, plan, 0, ["applied"])
    conductor.leave(1)
    assert conductor.record().missing == (1, 2, 3)
    assert not conductor.record().exact
    _train(conductor, plan, 0, ["applied"] * 3, first=1)
    record = conductor.record()
    assert record.exact
    assert record.returned == {1: (1,)}
    assert record.ranks == {0: 4}


def test_a_push_that_came_in_part_makes_its_batch_count_again() -> None:
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=2, shared=True)
    for rank in (0, 1):
        conductor.request(rank, TicketRequest(plan, 0))
    conductor.leave(1, partly=True)
    _train(conductor, plan, 0, ["applied", "applied"])
    record = conductor.record()
    assert (record.once, record.again, record.missing, record.exact) == (1, (1,), (), False)


def test_one_of_several_pushes_of_a_lost_window_makes_it_count_again() -> None:
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=2, shared=True, counts_windows=False)
    for rank in (0, 1):
        conductor.request(rank, TicketRequest(plan, 0))
    conductor.pushed((1, 0, 0), fate="applied", samples=4)
    conductor.leave(1)
    _train(conductor, plan, 0, ["applied", "applied"])
    assert conductor.record().again == (1,)


def test_a_rank_that_leaves_in_order_has_brought_its_window() -> None:
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=3, shared=True, hold=1, counts_windows=False)
    for rank in (0, 1):
        conductor.request(rank, TicketRequest(plan, 0))
    conductor.pushed((1, 0, 0), fate="applied", samples=4)
    conductor.finish(1)
    conductor.leave(1)
    record = conductor.record()
    assert record.ranks == {1: 1}
    assert record.returned == {1: ()}
    assert record.missing == (0, 2)


def test_a_resumed_epoch_owes_only_what_is_left() -> None:
    conductor = Conductor([0])
    plan = EpochPlan(epoch=1, batches=6, shared=True, cursor=EpochCursor(epoch=1, next=5, loose=(2,)))
    conductor.request(0, TicketRequest(plan, 0))
    assert (conductor.record().before, conductor.record().missing) == (4, (2, 5))
    _train(conductor, plan, 0, ["applied", "applied"])
    assert conductor.record().exact
