"""When a rank that is told to end may leave."""

from __future__ import annotations

import pytest

from lightning_g2.strategy.departure import Departure, LeaveJob


def test_a_rank_at_work_ends_its_window_first() -> None:
    departure = Departure(possible=True)
    with departure.waiting():
        pass
    departure.notice()
    assert departure.wanted
    with pytest.raises(LeaveJob) as left, departure.waiting():
        raise AssertionError("it asks for nothing more")
    assert left.value.code == 0


def test_a_rank_that_waits_leaves_at_once() -> None:
    departure = Departure(possible=True)
    with departure.waiting(), pytest.raises(LeaveJob):
        departure.notice()
    departure.notice()  # again, on its way out
