"""The conductor's promises, checked over whole epochs with ranks of any speed."""

from __future__ import annotations

import random

import pytest

from lightning_g2.server import Conductor, first_share
from lightning_g2.values import EpochCursor, EpochPlan, SyncPoint, TicketRequest


class Job:
    """Ranks that train at their own speed: time is counted in ticks, a batch takes a rank ``pace[rank]`` of them."""

    def __init__(
        self, pace: list[int], plan: EpochPlan, *, own: list[int] | None = None, seed: int = 0, every: int = 0
    ) -> None:
        self.pace, self.plan, self.own, self.every = pace, plan, own, every
        self.unpushed = [0] * len(pace)
        self.pushes = 0
        self.conductor = Conductor(range(len(pace)))
        self.random = random.Random(seed)
        self.trained: list[tuple[int, int]] = []  # rank, number
        self.points: list[tuple[int, SyncPoint, int]] = []  # rank, point, batches trained by then
        self.steps = [0] * len(pace)
        self.idle = [0] * len(pace)

    def run(self, limit: int = 100_000) -> None:
        """Let every rank ask, train, and meet the others until the epoch has ended for all."""
        plan, ranks = self.plan, range(len(self.pace))
        loaded = {r: list(first_share(plan, rank=r, ranks=len(self.pace))) for r in ranks}
        ready = dict.fromkeys(ranks, 0)  # when the rank asks again
        work: dict[int, list[int]] = {}
        at_point: dict[int, SyncPoint] = {}
        ended: set[int] = set()
        waiting: set[int] = set()
        now = 0
        while len(ended) < len(self.pace):
            assert now < limit, "nobody moves"
            for rank in self.random.sample(list(ranks), len(ranks)):
                if rank in ended or rank in at_point or rank in waiting or ready[rank] > now:
                    continue
                if rank in work:
                    self.trained += [(rank, n) for n in work.pop(rank)]
                    self._step(rank)
                exhausted = self.own is not None and self.own[rank] == 0
                waiting.add(rank)
                request = TicketRequest(plan, self.steps[rank], exhausted=exhausted, unpushed=self.unpushed[rank])
                for r, ticket in self.conductor.request(rank, request).items():
                    waiting.discard(r)
                    if ticket.point is not None:
                        at_point[r] = ticket.point
                        continue
                    loaded[r] += ticket.numbers
                    if self.own is not None:
                        size = min(ticket.batches, self.own[r])
                        self.own[r] -= size
                        work[r] = [-1] * size
                    else:
                        work[r] = [loaded[r].pop(0) for _ in range(ticket.batches)]
                    ready[r] = now + self.pace[r] * len(work[r])
            for rank in waiting | set(at_point):
                self.idle[rank] += 1
            if len(at_point) == len(self.pace) - len(ended):
                for rank, point in at_point.items():
                    self._push(rank)
                    self.points.append((rank, point, len(self.trained)))
                    if point.ends_epoch:
                        ended.add(rank)
                at_point.clear()
            now += 1
        self.now = now

    def _step(self, rank: int) -> None:
        """Make a step; with ``every`` it stays with the rank until there are so many."""
        self.steps[rank] += 1
        self.unpushed[rank] += bool(self.every)
        if self.unpushed[rank] == self.every:
            self._push(rank)

    def _push(self, rank: int) -> None:
        if self.unpushed[rank]:
            steps, self.unpushed[rank] = self.unpushed[rank], 0
            self.pushes += 1
            self.conductor.pushed((rank, 0, self.pushes), steps=steps)


@pytest.mark.parametrize("pace", [[1], [1, 1], [1, 4], [3, 1, 7], [1, 1, 1, 50]])
@pytest.mark.parametrize("hold", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 3])
def test_every_batch_is_trained_on_once(pace, hold, window):
    job = Job(pace, EpochPlan(epoch=0, batches=40, shared=True, window=window, hold=hold))
    job.run()
    assert sorted(n for _, n in job.trained) == list(range(40))
    assert all(point.ends_epoch and point.finished for _, point, _ in job.points)
    assert sum(job.steps) == job.conductor.steps >= -(-40 // window)


def test_windows_are_cut_as_one_process_would():
    job = Job([1, 2, 3], EpochPlan(epoch=0, batches=40, shared=True, window=3))
    job.run()
    assert sum(job.steps) == 14, "thirteen windows of three and one left over"


def test_nobody_waits_longer_than_one_batch_of_the_slowest():
    job = Job([1, 1, 4], EpochPlan(epoch=0, batches=90, shared=True))
    job.run()
    assert max(job.idle) <= 4 + 1
    assert job.now <= 90 / (1 + 1 + 1 / 4) + 4 + 2


@pytest.mark.parametrize("seed", range(5))
def test_validation_comes_when_the_whole_job_has_begun_so_many_batches(seed):
    plan = EpochPlan(epoch=0, batches=25, shared=True, validates=True, validate_every=10)
    job = Job([1, 3], plan, seed=seed)
    job.run()
    assert [(p.validate, n) for r, p, n in job.points if r == 0] == [(True, 10), (True, 20), (False, 25)]
    assert [(p, n) for r, p, n in job.points if r == 0] == [(p, n) for r, p, n in job.points if r == 1]


def test_the_interval_may_run_over_epochs():
    plan = EpochPlan(epoch=1, batches=25, shared=True, validates=True, validate_every=10, offset=25)
    job = Job([1, 3], plan)
    job.run()
    assert [n for r, p, n in job.points if r == 0 and p.validate] == [5, 15, 25]


def test_a_validation_at_the_end_is_part_of_the_last_point():
    plan = EpochPlan(epoch=0, batches=20, shared=True, validates=True, validate_every=10)
    job = Job([1, 2], plan)
    job.run()
    assert [(p.validate, p.ends_epoch, n) for r, p, n in job.points if r == 1] == [(True, False, 10), (True, True, 20)]


@pytest.mark.parametrize("own", [[3, 7], [0, 5], [4, 4]])
def test_ranks_with_data_of_their_own_wait_for_the_one_that_has_most(own):
    expected = sum(own)
    plan = EpochPlan(epoch=0, batches=None, shared=False, validates=True, validate_at_end=True, validate_every=4)
    job = Job([1, 2], plan, own=list(own))
    job.run()
    assert len(job.trained) == expected
    assert [n for r, p, n in job.points if r == 0 and p.ends_epoch] == [expected]
    validated = [n for r, p, n in job.points if r == 0 and p.validate]
    assert validated == sorted({*range(4, expected + 1, 4), expected}), "every four, and at the end"


def test_steps_run_out_exactly_at_the_limit():
    job = Job([1, 1, 5], EpochPlan(epoch=0, batches=100, shared=True, window=2, steps=17))
    job.run()
    assert sum(job.steps) == 17
    assert {(p.ends_epoch, p.finished) for _, p, _ in job.points} == {(True, False)}


def test_several_steps_a_window_stop_at_the_limit_too():
    conductor = Conductor([0, 1, 2])
    plan = EpochPlan(epoch=0, batches=100, shared=True, steps=20, counts_windows=False)
    steps, busy, ended = [0, 0, 0], set(), set()
    while len(ended) < 3:
        for rank in {0, 1, 2} - ended:
            steps[rank] += 2 * (rank in busy)
            busy.discard(rank)
            for answered, ticket in conductor.request(rank, TicketRequest(plan, steps[rank])).items():
                (ended if ticket.point is not None else busy).add(answered)
    assert sum(steps) == 20


def test_a_rank_that_wants_to_stop_stops_all_after_a_validation():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=100, shared=True, validates=True)
    assert conductor.request(0, TicketRequest(plan, 0))[0].batches == 1
    assert conductor.request(1, TicketRequest(plan, 0))[1].batches == 1
    expected = SyncPoint(validate=True, ends_epoch=True, finished=False, stop=True)
    assert conductor.request(1, TicketRequest(plan, 1, stop=True))[1].point == expected
    assert conductor.request(0, TicketRequest(plan, 1))[0].point == expected


def test_after_a_validation_a_stop_needs_no_other():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=100, shared=True, validates=True, validate_every=2)
    for rank in (0, 1):
        assert conductor.request(rank, TicketRequest(plan, 0))[rank].batches == 1
    for rank in (0, 1):
        assert conductor.request(rank, TicketRequest(plan, 1))[rank].point.validate
    for rank in (0, 1):
        point = conductor.request(rank, TicketRequest(plan, 1, stop=True))[rank].point
        assert (point.stop, point.validate) == (True, False)


def test_a_skipped_epoch_is_skipped_by_all_without_validation():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=9, shared=True, validates=True, validate_at_end=True)
    conductor.request(0, TicketRequest(plan, 0))
    point = conductor.request(0, TicketRequest(plan, 1, skip=True))[0].point
    assert point == SyncPoint(validate=False, ends_epoch=True, finished=True, stop=False)
    assert conductor.request(1, TicketRequest(plan, 0))[1].point == point


def test_the_next_epoch_starts_afresh():
    conductor = Conductor([0, 1])
    first, second = (EpochPlan(epoch=e, batches=2, shared=True) for e in (0, 1))
    for rank in (0, 1):
        assert conductor.request(rank, TicketRequest(first, 0))[rank].numbers == (rank,)
    assert not conductor.request(0, TicketRequest(first, 1)), "rank 1 may yet die, and leave its batch to rank 0"
    tickets = conductor.request(1, TicketRequest(first, 1))
    assert all(tickets[rank].point is not None for rank in (0, 1))
    assert conductor.request(1, TicketRequest(second, 1))[1].numbers == (0,)


def test_a_cursor_names_what_no_push_has_brought_and_resumes_there():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=3, batches=10, shared=True)
    for rank in (0, 1):
        conductor.request(rank, TicketRequest(plan, 0))
    conductor.pushed((1, 0, 0))
    assert conductor.cursor() == EpochCursor(epoch=3, next=2, loose=(0,))
    job = Job([1, 2], EpochPlan(epoch=3, batches=10, shared=True, cursor=conductor.cursor(), hold=2))
    job.run()
    assert sorted(n for _, n in job.trained) == [0, *range(2, 10)]


def test_steps_are_those_reported_and_those_that_pushes_tell():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=10, shared=True)
    for rank in (0, 1):
        conductor.request(rank, TicketRequest(plan, 0))
    conductor.pushed((0, 0, 0))
    assert conductor.steps == 1
    conductor.request(0, TicketRequest(plan, 1, pushes=1))
    assert conductor.steps == 1
    conductor.request(1, TicketRequest(plan, 1, pushes=1))  # its push arrives later
    assert conductor.steps == 2
    conductor.pushed((1, 0, 0))
    assert conductor.steps == 2
    assert conductor.cursor().loose == (2, 3)


def test_a_rank_that_asks_ahead_closes_each_window_with_its_own_push():
    """Three windows under way; the second is pushed first, the third never: it brings no gradient."""
    conductor = Conductor([0])
    plan = EpochPlan(epoch=0, batches=8, shared=True, window=2)
    conductor.request(0, TicketRequest(plan, 0))
    conductor.request(0, TicketRequest(plan, 0, open=(0,)))
    conductor.request(0, TicketRequest(plan, 0, open=(0, 1)))
    assert conductor.cursor() == EpochCursor(epoch=0, next=6, loose=(0, 1, 2, 3, 4, 5))
    conductor.pushed((0, 1, 0), window=1)
    assert conductor.cursor().loose == (0, 1, 4, 5)
    assert conductor.steps == 1
    conductor.pushed((0, 0, 0), window=0)
    assert (conductor.cursor().loose, conductor.steps) == ((4, 5), 2)
    # The first is through, the second has been pushed but not been counted as a step.
    conductor.request(0, TicketRequest(plan, 1, pushes=1, open=(1, 2)))
    assert (conductor.cursor().loose, conductor.steps) == ((4, 5, 6, 7), 2)
    ticket = conductor.request(0, TicketRequest(plan, 3, pushes=2, open=(3,)))[0]
    assert ticket.point is not None
    assert (conductor.cursor().loose, conductor.steps) == ((6, 7), 3)
    conductor.pushed((0, 2, 0), window=3)
    assert (conductor.cursor().loose, conductor.steps) == ((), 4)


def test_windows_asked_for_ahead_go_to_others_when_their_rank_leaves():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=4, shared=True)
    conductor.request(0, TicketRequest(plan, 0))
    conductor.request(0, TicketRequest(plan, 0, open=(0,)))
    conductor.leave(0)
    numbers = [conductor.request(1, TicketRequest(plan, step))[1].numbers for step in range(4)]
    assert sorted(n for given in numbers for n in given) == [0, 1, 2, 3]


def test_what_a_rank_leaves_behind_goes_to_the_others():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=4, shared=True, hold=1)
    conductor.request(0, TicketRequest(plan, 0))
    conductor.request(1, TicketRequest(plan, 0))
    held = [*conductor._ranks[1].begun, *conductor._ranks[1].held]
    conductor.leave(1)
    numbers = list(conductor._ranks[0].held)
    while (ticket := conductor.request(0, TicketRequest(plan, 0))[0]).point is None:
        numbers += ticket.numbers
    assert set(held) <= set(numbers)
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("pace", [[1], [1, 2], [3, 1, 7]])
@pytest.mark.parametrize(("every", "window"), [(2, 1), (5, 1), (3, 2)])
def test_steps_that_ranks_make_by_themselves_count_in_checkpoints_once_they_are_pushed(pace, every, window):
    """Ranks push after every few windows, and what is left over at the point."""
    plan = EpochPlan(epoch=0, batches=40, shared=True, window=window, hold=1)
    job = Job(pace, plan, every=every)
    job.run()
    assert sorted(n for _, n in job.trained) == list(range(40))
    assert job.conductor.steps == job.conductor.brought == sum(job.steps)
    assert job.conductor.cursor() == EpochCursor(epoch=0, next=40)
    assert job.pushes <= sum(-(-steps // every) for steps in job.steps)


def test_a_cursor_names_what_ranks_have_kept_to_themselves():
    conductor = Conductor([0, 1])
    plan = EpochPlan(epoch=0, batches=10, shared=True)
    for steps in range(3):
        ticket = conductor.request(0, TicketRequest(plan, steps, unpushed=steps))[0]
    assert (ticket.numbers, ticket.steps) == ((2,), 2), "its own steps it knows of"
    assert conductor.request(1, TicketRequest(plan, 0))[1].steps == 0, "but nobody else does"
    assert conductor.cursor().loose == (0, 1, 2, 3)
    assert (conductor.steps, conductor.brought) == (2, 0)
    conductor.pushed((0, 0, 0), steps=3)
    assert conductor.cursor().loose == (3,)
    assert (conductor.steps, conductor.brought) == (3, 3)
    conductor.request(1, TicketRequest(plan, 1, unpushed=1))
    assert conductor.cursor().loose == (3, 4)
    conductor.leave(1)
    assert conductor.cursor().loose == (3, 4)
    assert conductor.brought == 3, "what a rank takes with it has not been made"
