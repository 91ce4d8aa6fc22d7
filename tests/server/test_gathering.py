"""Collectives through the server, as a state machine."""

from __future__ import annotations

import itertools

import pytest

from lightning_g2.errors import ProtocolError
from lightning_g2.server import Gathering


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_get_what_all_have_brought_whatever_the_order(order: tuple[int, ...]) -> None:
    gathering: Gathering[str] = Gathering(range(3))
    for collective in ("a", "b"):
        *first, last = order
        for rank in first:
            assert gathering.bring(rank, "all_gather", f"{collective}{rank}") is None
        assert gathering.bring(last, "all_gather", f"{collective}{last}") == {r: f"{collective}{r}" for r in range(3)}


@pytest.mark.parametrize("came_first", [True, False])
def test_a_member_that_dies_is_waited_for_no_longer(came_first: bool) -> None:
    gathering: Gathering[int] = Gathering(range(3))
    if came_first:
        gathering.bring(1, "barrier", 1)
    gathering.bring(0, "barrier", 0)
    assert gathering.leave(1) is None
    assert gathering.bring(2, "barrier", 2) == {0: 0, 2: 2}
    assert gathering.bring(2, "barrier", 2) is None
    assert gathering.leave(0) == {2: 2}
    assert gathering.leave(2) is None


def test_different_collectives_are_an_error_not_a_wait() -> None:
    gathering: Gathering[int] = Gathering(range(2))
    gathering.bring(0, "broadcast", 0)
    with pytest.raises(ProtocolError, match="'barrier' of rank 1: rank 0 is in collective 'broadcast'"):
        gathering.bring(1, "barrier", 1)
    with pytest.raises(ProtocolError, match="rank 5 does not meet"):
        gathering.bring(5, "broadcast", 1)
