"""A server and ranks in one process, in every order of events that a seed gives: nobody waits in vain, nothing is lost.

Each push has a coordinate of its own, on which its gradient is one: what SGD with rate 1 leaves there is minus the
share that the push had in its version, once.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lightning_g2.errors import PeerFailedError
from lightning_g2.server import (
    Aggregation,
    Criterion,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    first_share,
    flatten,
    hyper_parameters,
)
from lightning_g2.transport import LocalTransport, PushReply, ServerHost, SyncReply
from lightning_g2.values import EpochPlan, PushKey, PushPacket, Ticket, TicketRequest

BATCHES, EPOCHS = 23, 2


@dataclass
class Rank:
    """One rank as its client behaves: question and answer take turns, whatever comes later is waited for."""

    version: int = 0
    sent: int = 0
    loaded: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    reply: bool = True  # the answer to its last push has come
    under_way: Callable[[], None] | None = None  # a push that has not reached the server yet
    asks: bool = False  # waits for a ticket
    meets: bool = False  # waits at a sync point
    epoch: int = 0
    done: bool = False


class Job:
    """Ranks and a server; :meth:`run` lets one thing after another happen, by chance."""

    def __init__(self, seed: int, *, ranks: int, prefetch: bool, window: int = 1, leaves: bool = False, **how) -> None:
        self.random = random.Random(seed)
        self.host = ServerHost(ranks, clock=itertools.count().__next__)
        self.ranks = {rank: Rank() for rank in range(ranks)}
        self.prefetch, self.leaves, self.rounds = prefetch, leaves, how.get("rounds") is not None
        weight = torch.nn.Parameter(torch.zeros(2 * BATCHES * EPOCHS))
        self.layout = ParameterLayout.of([("w", weight.detach())])
        optimizer = torch.optim.SGD([weight], lr=1.0)
        self.groups = tuple(map(hyper_parameters, optimizer.param_groups))
        spec = OptimizerSpec.of(optimizer, {id(weight): 0})
        setup = ServerSetup(self.layout, self.layout.allocate(), (spec,), ranks, aggregation=Aggregation(**how))
        self.host.configure(setup)
        self.plans = [
            EpochPlan(epoch, BATCHES, shared=True, window=window, hold=1, validates=True, validate_every=7)
            for epoch in range(EPOCHS)
        ]
        for rank, state in self.ranks.items():
            state.loaded = list(first_share(self.plans[0], rank=rank, ranks=ranks))
        self.coordinate: dict[PushKey, int] = {}
        self.batches: dict[PushKey, tuple[tuple[int, int], ...]] = {}  # epoch and number of each
        self.delivered: set[PushKey] = set()
        self.told: dict[PushKey, PushReply] = {}
        self.rejected: set[PushKey] = set()
        self.released: Counter[int] = Counter()

    def run(self) -> None:
        """Until every rank has ended its last epoch."""
        while left := {r: s for r, s in self.ranks.items() if not s.done}:
            actions = [action for rank, state in left.items() for action in self._possible(rank, state)]
            assert actions, f"nobody can move: {left}"
            self.random.choice(actions)()
            self._look_at_the_cursor()

    def _possible(self, rank: int, state: Rank) -> list[Callable[[], None]]:
        if state.under_way is not None:
            deliver = [lambda: self._deliver(state)]
            if not self.prefetch or state.asks or state.ticket is not None:
                return deliver
            return [*deliver, lambda: self._ask(rank, state)]
        if state.asks or state.meets:
            return []
        if state.ticket is None:
            if not state.reply and not self.prefetch:
                return []
            leave = [lambda: self._leave(rank, state)]
            may_leave = self.leaves and rank > 0 and state.reply and self.random.random() < 0.05
            return [lambda: self._ask(rank, state), *(leave if may_leave else [])]
        if not state.reply:
            return []  # a push, a meeting and, in rounds, the next window come after the answer to the last push
        if state.ticket.point is not None:
            return [lambda: self._meet(rank, state)]
        return [lambda: self._send(rank, state)]

    def _ask(self, rank: int, state: Rank) -> None:
        plan = self.plans[state.epoch]
        state.asks = True

        def take(ticket: Ticket | Exception) -> None:
            assert isinstance(ticket, Ticket)
            state.asks, state.ticket = False, ticket
            state.loaded += ticket.numbers

        self.host.ticket(rank, TicketRequest(plan, state.sent, pushes=state.sent), take)

    def _send(self, rank: int, state: Rank) -> None:
        assert state.ticket is not None
        rejected = self.random.random() < 0.15
        packet = PushPacket(
            rank=rank, lane=0, sequence=state.sent, base_version=state.version, groups=self.groups,
            present=() if rejected else (0,), samples=1, rejected=rejected,
        )  # fmt: skip
        key, gradients = packet.key, None
        self.coordinate[key] = len(self.coordinate)
        self.batches[key] = tuple((state.epoch, state.loaded.pop(0)) for _ in range(state.ticket.batches))
        if rejected:
            self.rejected.add(key)
        else:
            gradient, gradients = torch.zeros(2 * BATCHES * EPOCHS), self.layout.allocate()
            gradient[self.coordinate[key]] = 1.0
            flatten(self.layout, [gradient], (0,), gradients)
        state.sent, state.ticket, state.reply = state.sent + 1, None, False

        def take(reply: PushReply | Exception) -> None:
            assert isinstance(reply, PushReply)
            assert key not in self.told, "answered once"
            self.told[key], state.reply, state.version = reply, True, reply.weights.version

        def deliver() -> None:
            self.delivered.add(key)
            self.host.push(packet, gradients, take)

        state.under_way = deliver

    def _deliver(self, state: Rank) -> None:
        assert state.under_way is not None
        deliver, state.under_way = state.under_way, None
        deliver()

    def _meet(self, rank: int, state: Rank) -> None:
        assert state.ticket is not None
        assert state.ticket.point is not None
        ends, state.ticket, state.meets = state.ticket.point.ends_epoch, None, True

        def take(reply: SyncReply | Exception) -> None:
            assert isinstance(reply, SyncReply)
            assert self.host.snapshot().buffered == 0, "what was gathered is applied before anyone goes on"
            self.released[reply.release.version] += 1
            state.meets, state.version = False, reply.weights.version
            if ends:
                state.epoch += 1
                state.done = state.epoch == EPOCHS
                if not state.done:
                    plan = self.plans[state.epoch]
                    state.loaded = list(first_share(plan, rank=rank, ranks=len(self.ranks)))

        self.host.sync(rank, "announced", take)

    def _leave(self, rank: int, state: Rank) -> None:
        state.done = True
        self.host.leave(rank)

    def _look_at_the_cursor(self) -> None:
        """A batch has been trained on when its push is applied, rejected or late: the others are still to come."""
        cursor = self.host._conductor.cursor()
        if cursor is None or self.random.random() > 0.3:
            return
        weights = self.weights
        done = {k for k in self.delivered if k in self.rejected or self.is_late(k) or weights[self.coordinate[k]] != 0}
        trained = {n for key in done for epoch, n in self.batches[key] if epoch == cursor.epoch}
        assert {*cursor.loose, *range(cursor.next, BATCHES)} == set(range(BATCHES)) - trained

    def is_late(self, key: PushKey) -> bool:
        return key in self.told and self.told[key].receipt.late

    @property
    def weights(self) -> torch.Tensor:
        return self.layout.views(self.host.pull().buffer)[0]


HOW: list[dict[str, Any]] = [
    {"aggregate": 1}, {"aggregate": 2}, {"aggregate": 3}, {"rounds": 1}, {"rounds": 2}, {"rounds": 3},
    {"rounds": 2, "late": "gate"},
]  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(f"{k}{v}" for k, v in how.items()))
@pytest.mark.parametrize("prefetch", [False, True], ids=["fresh", "prefetch"])
@pytest.mark.parametrize("leaves", [False, True], ids=["all-stay", "some-leave"])
def test_no_order_of_arrivals_blocks_or_loses_or_repeats_a_push(how, prefetch: bool, leaves: bool) -> None:
    late = most = 0
    for seed in range(12):
        job = Job(seed, ranks=3, prefetch=prefetch, window=1 + seed % 2, leaves=leaves, **how)
        job.run()
        assert set(job.told) == set(job.coordinate), "each push is answered"
        records = job.host.drain()
        assert len(records) == len(job.coordinate), "and counted once"
        sizes = Counter(record.version for record in records if record.applied)
        for rank in job.ranks:
            keys = sorted(key for key in job.coordinate if key[0] == rank)
            applied = [key for key in keys if key not in job.rejected and not job.is_late(key)]
            versions = [record.version for record in records if record.rank == rank and record.applied]
            for key, version in zip(applied, versions, strict=True):
                assert job.weights[job.coordinate[key]] == -torch.tensor(1.0) / sizes[version]
            others = [job.coordinate[key] for key in keys if key not in applied]
            assert not job.weights[others].any(), "rejected and late ones moved nothing"
        late += sum(map(job.is_late, job.coordinate))
        if not leaves:
            handed = Counter(batch for numbers in job.batches.values() for batch in numbers)
            assert handed == Counter((epoch, n) for epoch in range(EPOCHS) for n in range(BATCHES))
            assert all(count % 3 == 0 for count in job.released.values()), "ranks that meet see one version"
            most = max(most, *sizes.values())
    assert leaves or most == (how.get("rounds") or how["aggregate"])
    assert (late > 0) == (how.get("rounds") in (1, 2) and how.get("late") != "gate")


@pytest.mark.parametrize("prefetch", [False, True], ids=["fresh", "prefetch"])
@pytest.mark.parametrize("leaves", [False, True], ids=["all-stay", "some-leave"])
@pytest.mark.parametrize("cost", [0.1, 1.0, 10.0])
def test_no_order_of_arrivals_blocks_a_job_that_changes_the_way_it_gathers(
    cost: float, prefetch: bool, leaves: bool
) -> None:
    chosen = set()
    for seed in range(12):
        job = Job(seed, ranks=3, prefetch=prefetch, leaves=leaves, auto=Criterion(staleness_cost=cost))
        job.run()
        assert set(job.told) == set(job.coordinate), "each push is answered"
        records = job.host.drain()
        assert len(records) == len(job.coordinate), "and counted once"
        moved = {key for key in job.coordinate if job.weights[job.coordinate[key]] != 0}
        assert moved == {key for key in job.coordinate if key not in job.rejected and not job.is_late(key)}
        choice = job.host.view().choice
        chosen |= set() if choice is None else {choice.rounds}
    assert chosen, "the times of arrival have been judged"


def _push(job: Job, rank: int, sequence: int = 0, value: float = 1.0) -> tuple[PushPacket, torch.Tensor]:
    gradients = job.layout.allocate()
    flatten(job.layout, [torch.full((2 * BATCHES * EPOCHS,), value)], (0,), gradients)
    packet = PushPacket(
        rank=rank, lane=0, sequence=sequence, base_version=job.host.view().version, groups=job.groups, present=(0,)
    )
    return packet, gradients


def test_a_push_of_a_round_is_answered_when_the_round_ends() -> None:
    job = Job(0, ranks=3, prefetch=False, rounds=2)
    transports = [LocalTransport(job.host, rank) for rank in range(3)]
    first = transports[0].push(*_push(job, 0))
    again = transports[0].push(*_push(job, 0))
    assert not first.done()
    second = transports[1].push(*_push(job, 1, value=3.0))
    for pending in (first, again, second):
        assert pending.done()
        reply = pending.wait()
        assert reply.receipt.applied
        assert reply.receipt.version == reply.weights.version == 1
        assert torch.equal(job.layout.views(reply.weights.buffer)[0], torch.full((2 * BATCHES * EPOCHS,), -2.0))


def test_weights_are_written_where_the_rank_of_the_push_reads_them() -> None:
    job = Job(0, ranks=2, prefetch=False, rounds=2)
    replies: list[PushReply | Exception] = []
    into = [job.layout.allocate() for _ in range(2)]
    job.host.push(*_push(job, 0), replies.append, into[0])
    assert not replies
    job.host.push(*_push(job, 1), replies.append, into[1])
    assert len(replies) == 2
    for buffer in into:
        assert torch.equal(job.layout.views(buffer)[0], torch.full((2 * BATCHES * EPOCHS,), -1.0))


def test_a_failure_of_the_job_ends_all_waits_once() -> None:
    job = Job(0, ranks=2, prefetch=False, rounds=2)
    replies: list[PushReply | Exception] = []
    later = _push(job, 0, sequence=1)
    job.host.push(*_push(job, 0), replies.append)
    job.host.fail(1, "boom")
    assert [type(reply) for reply in replies] == [PeerFailedError]
    job.host.push(*later, replies.append)
    job.host.leave(1)
    assert [str(reply) for reply in replies] == ["rank 1 failed, so the job ends: boom"] * 2


def test_an_optimizer_that_fails_over_the_pushes_of_others_ends_the_job() -> None:
    job = Job(0, ranks=3, prefetch=False, rounds=3)
    replies: list[PushReply | Exception] = []
    job.host.push(*_push(job, 0), replies.append)

    def fail(*_: object) -> None:
        raise ValueError("no step today")

    assert job.host._state is not None
    job.host._state._served[0].optimizer.step = fail  # type: ignore[method-assign]
    for rank in (1, 2):
        job.host.ticket(rank, TicketRequest(job.plans[0], 0, exhausted=True, stop=True), lambda _: None)
        job.host.leave(rank)
    assert "could not apply the pushes of several ranks" in str(replies[0])
    assert "no step today" in str(replies[0])


def test_a_round_waits_for_a_push_that_is_still_on_its_way() -> None:
    """Its rank has asked for a window already, of which there are none left: it waits, and yet its push will come."""
    job = Job(0, ranks=2, prefetch=True, rounds=2)
    replies: list[PushReply | Exception] = []
    job.host.push(*_push(job, 0), replies.append)
    later = _push(job, 1, value=3.0)
    plan = EpochPlan(epoch=0, batches=None, shared=False)
    job.host.ticket(1, TicketRequest(plan, 1, exhausted=True, pushes=1), lambda _: None)
    assert not replies
    job.host.push(*later, replies.append)
    assert len(replies) == 2
    assert torch.equal(job.weights, torch.full((2 * BATCHES * EPOCHS,), -2.0))
    job.host.push(*_push(job, 0, sequence=1), replies.append)
    assert len(replies) == 3, "now it has nothing more to send"
