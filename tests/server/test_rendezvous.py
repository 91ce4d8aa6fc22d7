from lightning_g2.server import FINAL_POINT, Rendezvous


def test_ranks_are_released_when_the_last_one_comes() -> None:
    meeting = Rendezvous(range(3))
    assert meeting.arrive(0, "validation") == {}
    assert meeting.arrive(2, "validation") == {}
    assert meeting.arrive(1, "validation") == dict.fromkeys((0, 1, 2), (0, 1, 2))


def test_a_rank_that_leaves_holds_nobody() -> None:
    meeting = Rendezvous(range(3))
    meeting.arrive(0, "validation")
    meeting.arrive(1, "validation")
    assert meeting.leave(2) == dict.fromkeys((0, 1), (0, 1))
    assert meeting.live == {0, 1}


def test_ranks_with_more_batches_go_on_alone_while_the_others_wait_at_the_end() -> None:
    meeting = Rendezvous(range(3))
    meeting.arrive(0, FINAL_POINT)
    meeting.arrive(1, "validation")
    assert meeting.arrive(2, "epoch_end") == {1: (1,), 2: (2,)}
    meeting.arrive(1, FINAL_POINT)
    assert meeting.arrive(2, FINAL_POINT) == dict.fromkeys((0, 1, 2), (0, 1, 2))
