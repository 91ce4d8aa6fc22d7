"""Who is dropped, and who is only slow: with times passed in."""

from __future__ import annotations

from lightning_g2.server import Heartbeats


def _run(heartbeats: Heartbeats, until_s: int, *, silent_from: dict[int, float], ranks: int = 3) -> dict[int, int]:
    """Second in which each rank is dropped, when ranks send heartbeats each second until they fall silent."""
    dropped: dict[int, int] = {}
    for now in range(until_s):
        for rank in range(ranks):
            if rank not in dropped and now < silent_from.get(rank, until_s):
                heartbeats.beat(rank, time_s=now)
        for rank in heartbeats.silent(time_s=now):
            dropped[rank] = now
            heartbeats.forget(rank)
    return dropped


def test_a_silent_rank_is_dropped_within_the_timeout_and_no_other() -> None:
    dropped = _run(Heartbeats(5.0), 60, silent_from={1: 20})
    assert list(dropped) == [1]
    assert 20 < dropped[1] <= 20 + 5


def test_a_silent_rank_that_uses_the_processor_stays() -> None:
    heartbeats = Heartbeats(5.0)
    for now in range(60):
        heartbeats.beat(0, time_s=now)
        if now < 2:
            heartbeats.beat(1, time_s=now)
        heartbeats.used(0, 100 * now, time_s=now)
        heartbeats.used(1, 100 * min(now, 40), time_s=now)  # held up by a long call, and frozen in second 40
        silent = heartbeats.silent(time_s=now)
        assert (silent == [1]) is (now >= 45), now


def test_nobody_is_dropped_when_all_are_silent() -> None:
    assert _run(Heartbeats(5.0), 60, silent_from=dict.fromkeys(range(3), 20)) == {}
    assert _run(Heartbeats(5.0), 60, silent_from={0: 20}, ranks=1) == {}, "nobody waits for a rank alone"


def test_a_rank_that_has_left_is_not_missed() -> None:
    heartbeats = Heartbeats(5.0)
    heartbeats.beat(0, time_s=0)
    heartbeats.beat(1, time_s=0)
    heartbeats.forget(1)
    for now in range(30):
        heartbeats.beat(0, time_s=now)
        assert heartbeats.silent(time_s=now) == []


def test_when_the_watcher_itself_was_held_up_nobody_is_silent() -> None:
    heartbeats = Heartbeats(5.0)
    for now in range(10):
        for rank in range(2):
            heartbeats.beat(rank, time_s=now)
        assert heartbeats.silent(time_s=now) == []
    heartbeats.beat(0, time_s=100)  # rank 1's message is still in the queue
    assert heartbeats.silent(time_s=100) == []
    heartbeats.beat(0, time_s=101)
    heartbeats.beat(1, time_s=101)
    assert heartbeats.silent(time_s=101) == []
