"""Simulated asynchronous training: real gradients through the server's own state machine and gates."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import build_gate
from lightning_g2.simulate import Observation, SimulationResult, layered, pareto, simulate, speeds, straggler, uniform

BATCHES = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.full((8,), i % 3)) for i in range(5)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def run(**options: Any) -> SimulationResult:
    known: dict[str, Any] = {
        "ranks": 4, "pushes": 40, "optimizer": "adam", "lr": 0.01, "delays": straggler(0.25, 4), "seed": 3
    }  # fmt: skip
    return simulate(net, loss, BATCHES, **{**known, **options})


def same(a: SimulationResult, b: SimulationResult) -> bool:
    fields = ("loss", "staleness", "energy", "weight", "time", "rank", "rejected", "version", "waited")
    alike = all(getattr(a, name) == getattr(b, name) for name in fields)
    return alike and all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


@pytest.mark.parametrize("gate", ["none", ("g2", {"beta": 4.0}), lambda: build_gate("dc")])
def test_a_run_is_determined_by_its_seed(gate: Any) -> None:
    state = torch.get_rng_state()
    one, two, other = run(gate=gate), run(gate=gate), run(gate=gate, seed=4)
    assert same(one, two)
    assert one.loss != other.loss
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_result_says() -> None:
    result = run()
    assert len(result.staleness) == len(result.energy) == len(result.weight) == len(result.time) == 40
    assert result.time == sorted(result.time)
    assert result.version == list(range(1, 41))
    assert result.weight == [1.0] * 40
    assert set(result.rank) == {0, 1, 2, 3}
    assert result.rank.count(3) < result.rank.count(0) / 2  # rank 3 is the slow one
    assert all(torch.equal(p, result.weights[name]) for name, p in result.model.named_parameters())
    with torch.no_grad():
        expected = sum(float(loss(result.model, batch)) for batch in BATCHES) / len(BATCHES)
    assert result.loss == pytest.approx(expected)


def test_an_observer_sees_every_push_and_changes_nothing() -> None:
    seen: list[Observation] = []

    def observe(observation: Observation) -> None:
        seen.append(observation)
        torch.randn(3)  # the run's own randomness does not depend on it

    rule = ("drop", {"limit": 5})
    options: dict[str, Any] = {"gate": rule, "optimizer": "sgd", "lr": 0.1, "schedule": lambda fraction: 1 - fraction}
    watched, alone = run(**options, observe=observe), run(**options)
    assert same(watched, alone)
    assert [o.number for o in seen] == list(range(40))
    assert [o.time for o in seen] == watched.time
    assert [o.context.staleness for o in seen] == watched.staleness
    assert [o.receipt.staleness for o in seen] == watched.staleness
    assert [o.decision.rejected for o in seen] == watched.rejected
    assert any(watched.rejected)
    for now, then in zip(seen, [*seen[1:], None], strict=True):
        for name, weight in now.before.items():
            step = 0.0 if now.decision.rejected else now.context.lr_of(name) * now.gradients[name]
            assert torch.allclose(now.after[name], weight - step, atol=1e-7)
            later = watched.weights if then is None else then.before
            assert torch.equal(later[name], now.after[name])


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), (partial(torch.optim.SGD, momentum=0.9), None)],
)
def test_one_rank_trains_as_a_loop_does_bit_for_bit(name: Any, optimizer: Any) -> None:
    given = net()
    mine = copy.deepcopy(given)
    step = (optimizer or name)(mine.parameters(), lr=0.05)
    for k in range(12):
        for group in step.param_groups:
            group["lr"] = 0.05 * (1 - k / 12)
        step.zero_grad()
        loss(mine, BATCHES[k % 5]).backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 0.3)
        step.step()
    for gate in ("none", "g2", "dc", "cosine"):
        result = simulate(
            given, loss, BATCHES, ranks=1, pushes=12, gate=gate, optimizer=name, lr=0.05, schedule=lambda f: 1 - f,
            clip=0.3, delays=uniform(), seed=0,
        )  # fmt: skip
        assert result.staleness == [0] * 12
        assert all(torch.equal(p, result.weights[n]) for n, p in mine.named_parameters())


def test_equal_ranks_take_turns() -> None:
    result = run(ranks=5, delays=uniform())
    assert result.rank == [i % 5 for i in range(40)]
    assert result.staleness == [0, 1, 2, 3] + [4] * 36


def test_gradients_belong_to_the_weights_that_were_read() -> None:
    """Delayed descent on a line, worked out by hand."""
    line = nn.Linear(1, 1, bias=False)
    result = simulate(
        line, lambda model, batch: 0.5 * model.weight.square().sum(), lambda rank, k: None,
        ranks=3, pushes=9, optimizer="sgd", lr=0.25, delays=uniform(), seed=0,
    )  # fmt: skip
    w = [line.weight.item()]
    for t in range(9):
        w.append(w[t] - 0.25 * w[max(0, t - 2)])
    assert result.weights["weight"].item() == pytest.approx(w[9], rel=1e-6)


def test_arrivals_depend_on_the_seed_alone() -> None:
    runs = [run(gate=gate, lr=lr, delays=pareto(1.3)) for gate, lr in (("none", 0.01), ("g2", 0.1), ("drop", 0.01))]
    assert runs[0].time == runs[1].time == runs[2].time
    assert runs[0].rank == runs[1].rank == runs[2].rank


def test_batches_by_rank_and_number_and_their_randomness() -> None:
    asked: list[tuple[int, int]] = []

    def draw(rank: int, k: int) -> tuple[Tensor, Tensor]:
        asked.append((rank, k))
        return torch.randn(8, 6), torch.randint(3, (8,))

    def result() -> SimulationResult:
        asked.clear()
        return simulate(
            net, loss, draw, ranks=3, pushes=9, optimizer="sgd", lr=0.1, delays=uniform(), seed=0, evaluation=BATCHES
        )

    one = result()
    assert asked == [(rank, k) for k in range(3) for rank in range(3)]
    assert same(one, result())


def test_a_time_limit_ends_the_run() -> None:
    result = run(pushes=None, time_limit=10.0, delays=speeds((1, 2, 4, 5), jitter=0.0))
    assert [result.rank.count(rank) for rank in range(4)] == [10, 5, 2, 2]
    assert result.time[-1] == 10.0
    for delays in (pareto(1.3), straggler(0.25, 4)):
        expected = delays.arrivals(ranks=4, seed=3, time_limit=9.5)
        assert len(run(pushes=None, time_limit=9.5, delays=delays).rank) == expected


def test_a_schedule_goes_by_pushes_or_time() -> None:
    fractions: list[float] = []

    def schedule(fraction: float) -> float:
        fractions.append(fraction)
        return 1.0

    run(ranks=2, pushes=4, delays=uniform(), schedule=schedule)
    assert fractions[:4] == [0.0, 0.0, 0.25, 0.5]
    fractions.clear()
    run(ranks=1, pushes=None, time_limit=4.0, delays=uniform(), schedule=schedule)
    assert fractions == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_versions_are_kept_for_as_long_as_they_are_needed() -> None:
    thousand = run(ranks=1000, pushes=50, delays=uniform())
    assert thousand.versions_held <= 51  # most ranks still work on version 0
    assert run(ranks=1, pushes=50).versions_held == 1
    assert run(ranks=4, pushes=50, delays=uniform()).versions_held == 4


def test_thousands_of_ranks() -> None:
    result = run(ranks=3000, pushes=100, gate="g2", delays=uniform(0.5))
    assert result.staleness == list(range(100))
    assert math.isfinite(result.loss)


def test_a_layer_that_is_read_later_is_less_stale() -> None:
    """With gradients of one, weights tell how many updates they have seen."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))

    seen: list[tuple[int, int]] = []

    def count(model: nn.Module, batch: object) -> Tensor:
        seen.append((-round(model.early.item()), -round(model.late.item())))
        return model.early.sum() + model.late.sum()

    result = simulate(
        Two, count, lambda rank, k: None, ranks=4, pushes=24, optimizer="sgd", lr=1.0,
        delays=layered(speeds((2.0, 2.31, 2.57, 3.03), jitter=0.0), {"late": 0.75}), seed=0,
    )  # fmt: skip
    began = [0.0] * 4
    for push, (rank, time) in enumerate(zip(result.rank, result.time, strict=True)):
        late = began[rank] + 0.75 * (time - began[rank])
        expected = [sum(t <= read for t in result.time) for read in (began[rank], late)]
        assert seen[push] == tuple(expected)
        assert result.staleness[push] == push - expected[0]  # of the block read first
        began[rank] = time
    assert any(late > early for early, late in seen)


def test_ssp_bounds_the_lead_and_says_who_waited() -> None:
    free, bound = (run(gate=gate, delays=speeds((1, 1, 1, 8), jitter=0.0)) for gate in ("none", ("ssp", {"bound": 2})))
    leads = []
    for result in (free, bound):
        counts = [0] * 4
        lead = 0
        for rank in result.rank:
            counts[rank] += 1
            lead = max(lead, counts[rank] - min(counts))
        leads.append(lead)
    assert leads[0] > 3
    assert leads[1] == 3  # it may begin with a lead of 2
    assert bound.waited[0] > 0.0
    assert bound.waited[3] == 0.0
    assert free.waited == [0.0] * 4


def test_zeno_has_its_evaluation_and_rejected_pushes_move_nothing() -> None:
    refusing = run(gate=("zeno", {"rho": 1e6, "epsilon": 0.0}))
    assert refusing.rejected == [True] * 40
    assert refusing.version == [0] * 40
    assert refusing.weight == [0.0] * 40
    accepting = run(gate=("zeno", {"rho": 0.0, "epsilon": 1e6, "refresh": 4}))
    assert same(accepting, run())


def test_gates_can_set_the_rate_of_an_update() -> None:
    gradient, rate = (run(gate=("inverse", {"scales": scales}), optimizer="sgd") for scales in ("gradient", "lr"))
    for name, weight in gradient.weights.items():
        assert torch.allclose(weight, rate.weights[name], atol=1e-6)
    assert run(gate=("inverse", {"scales": "lr"})).loss != run(gate="inverse").loss  # under Adam


def test_every_gate_trains() -> None:
    start = run(pushes=1, lr=0.0).loss
    for gate in ("concurrency", "cosine", "dc", "drop", "polynomial", "predict", "g2", "g2_random_subspace"):
        assert run(gate=gate).loss < start, gate
    assert run(gate="dana", optimizer="sgd").loss < start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks=0: must be an integer ≥ 1"),
        ({"pushes": None}, "pushes=None: must be given where there is no time_limit"),
        ({"pushes": 0}, "pushes=0: must be ≥ 1"),
        ({"time_limit": 0.0}, "time_limit=0.0: must be > 0"),
        ({"lr": -1.0}, "lr=-1.0: must be ≥ 0"),
        ({"clip": 0.0}, "clip=0.0: must be > 0"),
        ({"optimizer": "sgdd"}, "optimizer='sgdd': must be one of .*adam"),
        ({"delays": "slow"}, "delays='slow': must be one of uniform, straggler, pareto, speeds"),
        ({"gate": "g3"}, "gate='g3': must be one of"),
        ({"evaluation": []}, "evaluation=.*: must be a sequence of at least one batch"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(**options)


def test_bad_models_and_losses_are_refused() -> None:
    options: dict[str, Any] = {"ranks": 1, "pushes": 1, "optimizer": "sgd", "lr": 0.1, "delays": uniform(), "seed": 0}
    with pytest.raises(ConfigurationError, match=r"must be a torch.nn.Module or make one, made int"):
        simulate(lambda: 3, loss, BATCHES, **options)
    with pytest.raises(ConfigurationError, match=r"loss: gave Tensor of shape \(8, 3\)"):
        simulate(net, lambda model, batch: model(batch[0]), BATCHES, **options)
    stray = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"optimizer: steps 1 parameters, 0 of them are the model's"):
        simulate(net, loss, BATCHES, **{**options, "optimizer": lambda parameters: torch.optim.SGD([stray], lr=0.1)})


def mean_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    optimizer.zero_grad()
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()


def test_rounds_of_all_ranks_are_synchronous_training() -> None:
    given = net()
    mine = copy.deepcopy(given)
    optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
    for step in range(5):
        mean_step(mine, optimizer, [BATCHES[(4 * step + rank) % 5] for rank in range(4)])
    result = simulate(
        given, loss, BATCHES, ranks=4, pushes=20, optimizer="adam", lr=0.01, rounds=4, delays=straggler(0.25, 3, 0.0),
        seed=0,
    )  # fmt: skip
    assert result.staleness == [0] * 20
    assert result.version == [v for v in range(1, 6) for _ in range(4)]
    assert result.time[-1] == 15.0  # the slow rank sets the pace
    assert result.waited == [10.0] * 3 + [0.0]
    assert all(torch.allclose(p, result.weights[n], atol=1e-6) for n, p in mine.named_parameters())


def test_late_pushes_of_a_round_are_dropped_or_gated() -> None:
    delays = speeds((1, 1, 1, 2.5), jitter=0.0)
    dropped, gated = (run(rounds=3, delays=delays, late=late) for late in ("drop", "gate"))
    assert all(late == (rank == 3) for late, rank in zip(dropped.late, dropped.rank, strict=True))
    assert any(dropped.late)
    assert dropped.version[-1] == sum(not late for late in dropped.late) // 3
    assert not any(gated.late)
    assert {t for t, rank in zip(gated.staleness, gated.rank, strict=True) if rank == 3} & {2, 3}
    with pytest.raises(ConfigurationError, match="late='keep': must be one of drop, gate"):
        run(rounds=3, late="keep")


def test_a_buffer_makes_one_version_of_several_pushes() -> None:
    result = run(aggregate=4, delays=uniform(), optimizer="sgd")
    assert result.version == [v for v in range(1, 11) for _ in range(4)]
    assert result.staleness == [0] * 4 + [1, 1, 1, 0] * 9  # three of the ranks have read before the version came
    assert result.waited == [0.0] * 4
    rest = run(aggregate=4, delays=uniform(), pushes=42)
    assert rest.version[-2:] == [11, 11]  # what is left at the end is applied as it is
    ages = run(aggregate=4, delays=uniform(), gate="concurrency").weight
    assert set(ages) == {1.0}  # a version of four pushes is a round of four ranks


def sgd(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def test_rounds_are_chosen_by_times_of_arrival_and_by_what_staleness_costs() -> None:
    delays = straggler(0.25, 10, jitter=0.0)
    dear = run(ranks=8, rounds="auto", delays=delays, pushes=200, optimizer=sgd, lr=0.001)
    assert dear.rounds[0] == 4, "half of the ranks, before anything is known"
    assert set(dear.rounds[100:]) == {6}, "without the two slow ones"
    assert all(late == (rank >= 6) for late, rank in list(zip(dear.late, dear.rank, strict=True))[100:])
    gated = run(ranks=8, rounds="auto", delays=delays, pushes=200, gate="g2")
    assert set(gated.rounds) == {0}, "under Adam and the gate nobody waits"
    assert gated.waited == [0.0] * 8
    told = run(ranks=8, rounds="auto", delays=delays, pushes=200, gate="g2", staleness_cost=10.0)
    assert set(told.rounds[100:]) == {6}
    assert same(told, run(ranks=8, rounds="auto", delays=delays, pushes=200, gate="g2", staleness_cost=10.0))


def test_without_rounds_auto_is_the_buffer_that_was_asked_for() -> None:
    auto = run(rounds="auto", aggregate=2, gate="g2", staleness_cost=0.0)
    assert same(auto, run(aggregate=2, gate="g2"))


def test_weights_of_a_buffer_and_delayed_momentum_change_the_result_where_pushes_are_stale() -> None:
    plain = run(aggregate=2, optimizer=sgd)
    fedbuff = run(aggregate=2, optimizer=sgd, buffer_weights="fedbuff")
    delayed = run(aggregate=2, optimizer=sgd, delayed_nesterov=True)
    assert plain.staleness == fedbuff.staleness
    assert len({plain.loss, fedbuff.loss, delayed.loss}) == 3
    assert delayed.version == list(range(1, 41)), "each push a version"


def test_a_round_that_nobody_can_join_ends() -> None:
    result = run(rounds=4, gate=("ssp", {"bound": 0}), delays=uniform(), pushes=12)
    assert result.staleness == [0] * 12
    uneven = run(rounds=3, gate=("ssp", {"bound": 0}), delays=speeds((1, 1, 1, 2.5), jitter=0.0), pushes=12)
    assert len(uneven.rank) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": 5}, "aggregate=5: must be an integer from 1 to the number of ranks, 4"),
        ({"rounds": 0}, "rounds=0: must be an integer from 1 to"),
        ({"rounds": "some"}, "rounds='some': must be an integer from 1 to"),
        ({"buffer_weights": "fedbuff"}, "buffer_weights='fedbuff': must be 'equal' beside aggregate=1"),
        ({"rounds": 2, "delayed_nesterov": True}, "delayed_nesterov=True: must be False beside aggregate=1"),
        ({"aggregate": 2, "delayed_nesterov": True}, "delayed_nesterov=True with optimizer Adam: the delayed form is"),
        ({"rounds": "auto", "staleness_cost": -1.0}, "staleness_cost=-1.0: must be ≥ 0"),
        ({"rounds": 2, "aggregate": 2}, "aggregate=2: must be 1 beside rounds=2"),
    ],
)
def test_bad_aggregation_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(**options)
