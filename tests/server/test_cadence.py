"""``rounds="auto"``: what measured times of arrival make of it, by hand-made arrivals."""

from __future__ import annotations

import heapq
import io
from collections.abc import Callable

import pytest
import torch

from lightning_g2.server import (
    Aggregation,
    Criterion,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    ServerState,
    flatten,
    hyper_parameters,
    staleness_cost_of,
)
from lightning_g2.server.cadence import Cadence, replayed
from lightning_g2.values import PushPacket, PushReceipt

CALM, HARMFUL = Criterion(staleness_cost=0.1), Criterion(staleness_cost=10.0)


class Clockwork:
    """Ranks that take given times, before a server; gradients are ones, the rate is 1."""

    def __init__(
        self, times: dict[int, Callable[[float], float]], criterion: Criterion, *, kept: ServerState | None = None,
        aggregate: int = 1,
    ) -> None:  # fmt: skip
        self.times, self.count, self.time = times, 0, 0.0
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        self.layout = ParameterLayout.of([("w", weight.detach())])
        self.groups = tuple(map(hyper_parameters, optimizer.param_groups))
        snapshot = None if kept is None else kept.snapshot()
        setup = ServerSetup(
            self.layout, self.layout.allocate() if snapshot is None else snapshot.weights,
            (OptimizerSpec.of(optimizer, {id(weight): 0}),), len(times),
            aggregation=Aggregation(aggregate=aggregate, auto=criterion),
            cadence=None if snapshot is None else snapshot.cadence,
        )  # fmt: skip
        self.server = ServerState(setup)
        self.sequence = dict.fromkeys(times, 0)
        self.waiting: set[int] = set()
        self.receipts: list[PushReceipt] = []
        self.events: list[tuple[float, int, int]] = []
        for rank in times:
            self._begin(rank)

    def _begin(self, rank: int) -> None:
        self.server.begin(rank, time_s=self.time)
        heapq.heappush(self.events, (self.time + self.times[rank](self.time), rank, self.server.version))

    def run(self, pushes: int) -> list[int]:
        """Let so many pushes arrive; returns the rounds in force after each."""
        in_force = []
        for _ in range(pushes):
            assert self.events, f"all of {self.waiting} wait for a round that nobody ends"
            self.time, rank, base = heapq.heappop(self.events)
            buffer = self.layout.allocate()
            flatten(self.layout, [torch.ones(1)], (0,), buffer)
            packet = PushPacket(rank, 0, self.sequence[rank], base, groups=self.groups, present=(0,))
            receipt = self.server.push(packet, buffer, time_s=self.time)
            self.receipts.append(receipt)
            self.sequence[rank] += 1
            self.waiting.add(rank)
            if not receipt.waits:
                self._answer(rank)
            self._settle()
            in_force.append(self.server.rounds)
        return in_force

    def drop(self, rank: int) -> None:
        self.events = [event for event in self.events if event[1] != rank]
        heapq.heapify(self.events)
        self.waiting.discard(rank)
        self.server.drop(rank, time_s=self.time)
        self._settle()

    def _settle(self) -> None:
        for rank, _, _ in self.server.settled():
            self._answer(rank)

    def _answer(self, rank: int) -> None:
        if rank in self.waiting:
            self.waiting.remove(rank)
            self._begin(rank)


def alike(*times: float) -> dict[int, Callable[[float], float]]:
    return {rank: lambda _, time=time: time for rank, time in enumerate(times)}


FAST_AND_SLOW = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10.0, 10.3)


def test_harmful_staleness_makes_rounds_without_the_slow_ranks() -> None:
    job = Clockwork(alike(*FAST_AND_SLOW), HARMFUL)
    in_force = job.run(200)
    assert in_force[0] == 4, "half of the ranks, before anything is known"
    assert set(in_force[60:]) == {6}
    choice = job.server.view().choice
    assert choice is not None
    assert (choice.rounds, choice.best_rounds, choice.ranks, choice.staleness_cost) == (6, 6, 8, 10.0)
    assert choice.synchronous > choice.asynchronous
    assert "rounds of 6 from version" in str(choice)
    assert any(receipt.late for receipt in job.receipts[60:]), "the slow ones come too late"


def test_harmless_staleness_makes_no_rounds() -> None:
    job = Clockwork(alike(*FAST_AND_SLOW), CALM)
    assert set(job.run(200)) == {0}
    assert job.server.version == 200
    choice = job.server.view().choice
    assert choice is not None
    assert choice.rounds is None
    assert choice.asynchronous > choice.synchronous


def test_ranks_that_become_slow_change_the_choice_and_one_that_leaves_does() -> None:
    times = alike(1.0, 1.0, 1.0) | {3: lambda time: 1.0 if time < 60.0 else 20.0}
    job = Clockwork(times, HARMFUL)
    assert job.run(160)[-1] == 4, "four alike"
    assert job.run(300)[-1] == 3, "three of them, without the one that has become slow"
    job.drop(0)
    assert job.server.rounds == 2
    assert job.run(50)[-1] == 2
    job.drop(1)
    job.drop(2)
    assert job.run(4) == [0] * 4, "the last one waits for nobody"


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_dies_in_a_round_holds_nobody(rank: int) -> None:
    job = Clockwork(alike(1.0, 1.0, 30.0), HARMFUL)
    job.run(40)
    job.drop(rank)
    job.run(40)
    assert job.server.version >= 20


def test_gradients_begun_before_there_were_rounds_are_not_late() -> None:
    """The first decision comes when all ranks are under way: what they bring counts, as it would have without it."""
    job = Clockwork(alike(1.0, 1.0, 1.0, 1.0), Criterion(staleness_cost=0.99))
    job.server._cadence._criterion = HARMFUL  # type: ignore[union-attr] # a first phase without rounds
    job.run(200)
    assert job.server.rounds == 4
    assert not any(receipt.late for receipt in job.receipts)
    weight = float(job.layout.views(job.server.weights()[1])[0])
    assert weight == -job.server.version, "each version a mean of ones"


def test_a_resumed_server_goes_on_with_the_choice() -> None:
    job = Clockwork(alike(*FAST_AND_SLOW), HARMFUL)
    job.run(200)
    resumed = Clockwork(alike(*FAST_AND_SLOW), HARMFUL, kept=job.server)
    assert resumed.server.rounds == 6
    assert resumed.server.view().choice is None, "nothing has been decided anew"
    assert set(resumed.run(100)) == {6}
    buffer = io.BytesIO()
    torch.save(job.server.snapshot().cadence, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == job.server.snapshot().cadence


def test_time_between_meetings_alone_is_measured() -> None:
    job = Clockwork(alike(1.0, 1.0), HARMFUL)
    job.run(4)
    for rank in (0, 1):
        job.server.pause(rank)
    job.time += 1000.0  # a long validation
    job.events.clear()
    for rank in (0, 1):
        job._begin(rank)
    job.run(8)
    snapshot = job.server.snapshot().cadence
    assert snapshot is not None
    assert {t for times in snapshot["times"].values() for t in times} == {1.0}


def test_buffers_and_rounds_are_weighed_against_each_other() -> None:
    job = Clockwork(alike(*FAST_AND_SLOW), CALM, aggregate=4)
    assert set(job.run(200)) == {0}
    assert job.server.version == 50


@pytest.mark.parametrize(
    ("times", "m", "late", "pace", "age"),
    [
        ((1.0, 1.0), 2, "drop", 2.0, 0.0),
        ((1.0, 2.0), 2, "drop", 1.0, 0.0),
        ((1.0, 2.5), 1, "drop", 1.0, 0.0),
        ((1.0, 1.0, 4.0), 2, "drop", 2.0, 0.0),
    ],
)
def test_rounds_replayed_on_measured_times(times, m, late, pace, age) -> None:
    measured = replayed({rank: [time] for rank, time in enumerate(times)}, m, late)
    assert measured == pytest.approx((pace, age))


def test_gated_late_pushes_count_with_their_age() -> None:
    pushes_per_s, age = replayed({0: [1.0], 1: [1.0], 2: [1.5]}, 2, "gate")
    assert pushes_per_s > 2.0
    assert 0.0 < age < 2.0


def test_nothing_is_decided_without_times() -> None:
    cadence = Cadence(Criterion(), aggregate=1, late="drop")
    assert cadence.decide({0, 1}, None, version=0, time_s=5.0) is None
    for rank in (0, 1):
        cadence.begin(rank, 5.0)
    assert cadence.decide({0, 1}, None, version=0, time_s=5.0) is None, "no time has passed"


def test_momentum_makes_staleness_dear_and_the_gate_cheap() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    sgd, adam = torch.optim.SGD(parameters, lr=1.0, momentum=0.9), torch.optim.Adam(parameters)
    assert staleness_cost_of([sgd], 1.0) == pytest.approx(10.0)
    assert staleness_cost_of([torch.optim.SGD(parameters, lr=1.0)], 1.0) == 1.0
    assert staleness_cost_of([adam], 0.25) == 0.25
    assert staleness_cost_of([adam, sgd], 0.25) == pytest.approx(2.5)
