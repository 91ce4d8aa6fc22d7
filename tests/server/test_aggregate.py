"""Several pushes a version: what a buffer of K and a synchronous round apply, when, and what each push is told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from lightning_g2.errors import ConfigurationError
from lightning_g2.server import (
    Aggregation,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    ServerState,
    flatten,
    flatten_gradients,
    hyper_parameters,
    served_optimizers,
)
from lightning_g2.values import PushPacket, PushReceipt, SparseShape


class Bench:
    """A server fed by hand; ``make`` gives the optimizers of the parameters."""

    def __init__(
        self, parameters, make, *, ranks=4, aggregate=1, rounds=None, late="drop", buffer_weights="equal",
        delayed=False, **setup,
    ) -> None:  # fmt: skip
        self.parameters = [torch.nn.Parameter(p) for p in parameters]
        self.optimizers = make(self.parameters)
        layout = ParameterLayout.of((f"p{i}", p.detach()) for i, p in enumerate(self.parameters))
        weights = layout.allocate()
        flatten(layout, [p.detach() for p in self.parameters], layout.all(), weights)
        index = {id(p): i for i, p in enumerate(self.parameters)}
        how = Aggregation(
            aggregate=aggregate, rounds=rounds, late=late, buffer_weights=buffer_weights, delayed_nesterov=delayed
        )
        specs = tuple(OptimizerSpec.of(o, index) for o in served_optimizers(self.optimizers, how))
        self.server = ServerState(ServerSetup(layout, weights, specs, ranks, aggregation=how, **setup))
        self.sequence = [0] * ranks

    def push(self, rank, gradients, *, base=None, optimizer=0, **fields) -> PushReceipt:
        """Push gradients by index; None instead of them is a rejected push. The buffer is ruined afterwards."""
        rejected, gradients = gradients is None, gradients or {}
        sparse = {
            i: SparseShape(g.sparse_dim(), g._nnz(), g.is_coalesced()) for i, g in gradients.items() if g.is_sparse
        }
        present, layout = tuple(gradients), self.server.layout
        buffer = torch.zeros(layout.of_gradients(present, sparse).size_bytes(), dtype=torch.uint8)
        flatten_gradients(layout, list(gradients.values()), present, sparse, buffer)
        packet = PushPacket(
            rank=rank, lane=0, sequence=self.sequence[rank], present=present, sparse=sparse, rejected=rejected,
            base_version=self.server.version if base is None else base, optimizer=optimizer,
            groups=tuple(map(hyper_parameters, self.optimizers[optimizer].param_groups)),
        )  # fmt: skip
        receipt = self.server.push(replace(packet, **fields), None if rejected else buffer, time_s=0.0)
        buffer.fill_(255)
        self.sequence[rank] += 1
        return receipt

    @property
    def weights(self) -> list[torch.Tensor]:
        return self.server.layout.views(self.server.weights()[1])

    @property
    def weight(self) -> float:
        """The one number that all weights are."""
        (value,) = {float(x) for w in self.weights for x in w.flatten()}
        return value


def _sgd(parameters):
    return [torch.optim.SGD(parameters, lr=1.0)]


def _one(**options) -> Bench:
    return Bench([torch.zeros(3)], _sgd, **options)


def _of(value: float) -> dict[int, torch.Tensor]:
    return {0: torch.full((3,), value)}


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_the_mean_of_k_pushes_is_one_version() -> None:
    bench = _one(aggregate=3)
    first, second = bench.push(0, _of(1.0)), bench.push(1, _of(2.0))
    assert first == PushReceipt(version=0, staleness=0, applied=False, buffered=True) == second
    assert bench.weight == 0.0
    assert bench.server.settled() == {}
    assert bench.push(2, _of(6.0)) == PushReceipt(version=1, staleness=0, applied=True)
    assert bench.weight == -3.0
    assert bench.server.settled() == dict.fromkeys([(0, 0, 0), (1, 0, 0)], PushReceipt(1, 0, applied=True))
    assert bench.server.settled() == {}, "each push is settled once"
    assert [(r.rank, r.version, r.staleness) for r in bench.server.telemetry.drain()] == [
        (0, 1, 0),
        (1, 1, 0),
        (2, 1, 0),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: [torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True)],
        lambda ps: [torch.optim.AdamW(ps, lr=0.01, amsgrad=True)],
    ],
    ids=["sgd", "adamw"],
)
def test_buffers_of_all_ranks_are_what_ddp_does(make) -> None:
    """Steps of the module's own optimizer on the mean gradient, bit for bit."""
    torch.manual_seed(0)
    initial = [torch.randn(6, 5), torch.randn(5)]
    bench = Bench(initial, make, ranks=3, aggregate=3)
    mine = [torch.nn.Parameter(p.clone()) for p in initial]
    (optimizer,) = make(mine)
    for version in range(5):
        gradients = [[torch.randn_like(p) for p in mine] for _ in range(3)]
        first, *others = random.Random(version).sample(range(3), 3)
        for rank in (first, *others):
            bench.push(rank, dict(enumerate(gradients[rank])), base=version)
        for i, parameter in enumerate(mine):
            parameter.grad = sum((gradients[rank][i] for rank in others), gradients[first][i]) / 3
        optimizer.step()
    assert bench.server.version == 5
    for theirs, parameter in zip(bench.weights, mine, strict=True):
        assert torch.equal(theirs, parameter)


def test_a_parameter_counts_with_zero_where_a_push_has_no_gradient_for_it() -> None:
    bench = Bench(
        [torch.zeros(2), torch.zeros(2), torch.ones(2)], lambda ps: [torch.optim.AdamW(ps, lr=1.0)], aggregate=2
    )
    sgd = Bench([torch.zeros(2), torch.zeros(2), torch.ones(2)], _sgd, aggregate=2)
    for each in (bench, sgd):
        each.push(0, {0: torch.full((2,), 4.0)})
        each.push(1, {0: torch.full((2,), 2.0), 1: torch.full((2,), 2.0)})
    assert [float(w[0]) for w in sgd.weights] == [-3.0, -1.0, 1.0]
    assert torch.equal(bench.weights[2], torch.ones(2)), "no push had a gradient: not even weight decay"
    assert set(bench.server.snapshot().states[0]) == {0, 1}


def test_sparse_gradients_stay_sparse_and_a_dense_one_beside_them_makes_them_dense() -> None:
    def sparse(row: int, value: float) -> torch.Tensor:
        return torch.sparse_coo_tensor([[row]], torch.full((1, 2), value), (4, 2), check_invariants=True)

    bench = Bench([torch.zeros(4, 2)], lambda ps: [torch.optim.SparseAdam(ps, lr=1.0)], aggregate=3)
    for rank, (row, value) in enumerate([(1, 3.0), (1, 6.0), (3, 9.0)]):
        bench.push(rank, {0: sparse(row, value)})
    state = bench.server.snapshot().states[0][0]["exp_avg"]  # a tenth of the mean: SparseAdam takes sparse ones alone
    assert torch.allclose(state[:, 0], torch.tensor([0.0, 0.3, 0.0, 0.3]))
    for order in ([sparse(1, 4.0), torch.ones(4, 2)], [torch.ones(4, 2), sparse(1, 4.0)]):
        mixed = Bench([torch.zeros(4, 2)], _sgd, aggregate=2)
        for rank, gradient in enumerate(order):
            mixed.push(rank, {0: gradient})
        assert torch.equal(mixed.weights[0][:, 0], torch.tensor([-0.5, -2.5, -0.5, -0.5]))


def test_half_precision_is_added_up_in_float32() -> None:
    bench = Bench([torch.zeros(1, dtype=torch.bfloat16)], _sgd, aggregate=4, master_dtype=torch.float32)
    for rank, value in enumerate([256.0, 1.0, 1.0, 1.0]):  # in bfloat16 256 + 1 is 256
        bench.push(rank, {0: torch.full((1,), value, dtype=torch.bfloat16)})
    assert float(bench.server._weights.masters()[0]) == -64.75


def test_each_optimizer_and_each_one_within_another_has_a_buffer_of_its_own() -> None:
    class Wrapper(torch.optim.Optimizer):
        """Steps ten times as far as the one that it wraps."""

        def __init__(self, parameters) -> None:
            super().__init__(parameters, {"lr": 1.0})
            self.base_optimizer = torch.optim.SGD(self.param_groups, lr=1.0)

        @torch.no_grad()
        def step(self, closure=None) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter -= 10 * parameter.grad

    bench = Bench(
        [torch.zeros(1), torch.zeros(1)],
        lambda ps: [torch.optim.SGD(ps[:1], lr=1.0), Wrapper(ps[1:])], aggregate=2,
    )  # fmt: skip
    one = torch.ones(1)
    bench.push(0, {0: one})
    bench.push(0, {1: one}, optimizer=1)
    bench.push(0, {1: 3 * one}, optimizer=1, inner="base_optimizer")
    assert bench.server.version == 0
    bench.push(1, {1: one}, optimizer=1, inner="base_optimizer")
    assert [float(w) for w in bench.weights] == [0.0, -2.0]
    bench.push(1, {1: one}, optimizer=1, base=0)
    assert [float(w) for w in bench.weights] == [0.0, -12.0]
    bench.push(1, {0: one}, base=2)
    assert [float(w) for w in bench.weights] == [-1.0, -12.0]
    ages = [(r.rank, r.version, r.staleness) for r in bench.server.telemetry.drain()]
    assert ages == [(0, 1, 0), (1, 1, 0), (0, 2, 1), (1, 2, 1), (0, 3, 2), (1, 3, 0)], "ages at application"


@pytest.mark.parametrize(
    ("samples", "values", "moved"),
    [
        ((1, 3), (4.0, 8.0), 7.0),  # the mean over samples
        ((0, 2, 4, 4), (4.0, 8.0, 2.0, 2.0), 8.0 + 16 / 5),  # then 4 and 4 of 10 in 4 pushes
        ((0, 0), (4.0, 8.0), 6.0),
    ],
)
def test_pushes_of_a_version_can_be_weighted_by_their_samples(samples, values, moved) -> None:
    bench = _one(aggregate=2, ranks=2, weight_by_samples=True)
    for i, (count, value) in enumerate(zip(samples, values, strict=True)):
        bench.push(i % 2, _of(value), samples=count)
    assert bench.weight == pytest.approx(-moved)


def test_a_rejected_push_is_an_arrival_that_the_mean_leaves_out() -> None:
    bench = _one(aggregate=2)
    assert bench.push(0, None) == PushReceipt(version=0, staleness=0, applied=False)
    assert bench.push(1, _of(3.0)).applied
    assert bench.weight == -3.0
    bench.push(0, _of(3.0))
    assert bench.push(1, None) == PushReceipt(version=2, staleness=0, applied=False)
    assert bench.weight == -6.0
    bench.push(0, None)
    assert bench.push(1, None).version == 2, "nothing to apply: no version"
    assert bench.push(1, _of(1.0)).buffered, "and the next one starts from nothing"
    totals = bench.server.telemetry.totals()
    assert (totals[0].rejected, totals[0].pushes, totals[1].rejected, totals[1].pushes) == (2, 1, 2, 1)


def test_a_flush_applies_what_is_there_and_a_rank_that_leaves_makes_buffers_smaller() -> None:
    bench = _one(aggregate=3, ranks=3)
    bench.server.flush(time_s=0.0)
    assert bench.server.version == 0
    bench.push(0, _of(1.0))
    bench.push(0, _of(3.0), base=0)
    bench.server.flush(time_s=5.0)
    assert (bench.server.version, bench.weight) == (1, -2.0)
    assert [r.time_s for r in bench.server.telemetry.drain()] == [5.0, 5.0]
    bench.push(0, _of(4.0))
    bench.server.drop(2, time_s=6.0)
    assert (bench.server.version, bench.weight) == (2, -6.0)
    assert bench.server.view().pushes_per_version == 2
    bench.push(0, _of(1.0))
    assert bench.push(1, _of(1.0)).applied
    bench.server.drop(2, time_s=6.0)
    bench.server.drop(1, time_s=6.0)
    assert bench.push(0, _of(1.0)).applied, "alone, each push is a version"


def test_a_repeated_push_is_told_what_has_become_of_it_and_counts_once() -> None:
    bench = _one(aggregate=2)
    bench.push(0, _of(1.0))
    bench.sequence[0] = 0
    assert bench.push(0, _of(1.0), base=0).buffered
    bench.push(1, _of(3.0))
    bench.sequence[0] = 0
    assert bench.push(0, _of(1.0), base=0) == PushReceipt(version=1, staleness=0, applied=True)
    assert bench.weight == -2.0


def test_a_snapshot_holds_applied_pushes_alone() -> None:
    bench = _one(aggregate=2)
    bench.push(0, _of(1.0))
    snapshot = bench.server.snapshot()
    assert (snapshot.version, snapshot.buffered) == (0, 1)
    assert not snapshot.weights.any()
    bench.push(1, _of(1.0))
    assert (bench.server.snapshot().version, bench.server.snapshot().buffered) == (1, 0)


def test_the_age_of_a_push_counts_its_versions_as_so_many_pushes() -> None:
    bench = _one(aggregate=2)
    assert bench.server.view().pushes_per_version == 2
    bench.push(1, _of(1.0), energy=1.0, staleness=3)
    assert bench.server.view().window == {1: pytest.approx(3 * 2 / 4)}  # Ê = E·τK/N


# --- weights of a buffer, and delayed momentum ------------------------------------------------------------------------


def test_fedbuff_is_the_mean_of_gradients_over_the_root_of_their_age() -> None:
    bench = _one(aggregate=2, buffer_weights="fedbuff")
    for value in (1.0, 3.0):
        bench.push(0, _of(value))
    assert bench.weight == -2.0, "fresh ones count as ever"
    bench.push(0, _of(1.0))
    bench.push(1, _of(5.0), base=0)
    bench.push(2, _of(7.0), base=2)
    bench.push(3, _of(4.0), base=0)
    by_formula = -2.0 - (1.0 + 5.0 / 2**0.5) / 2 - (7.0 + 4.0 / 3**0.5) / 2
    assert bench.weight == pytest.approx(by_formula, rel=1e-6)


def test_fedbuff_weighs_what_a_flush_applies_and_sparse_and_half_gradients_too() -> None:
    bench = _one(aggregate=2, buffer_weights="fedbuff")
    for _ in range(2):
        bench.push(0, _of(0.0))
    bench.push(1, _of(4.0), base=0)
    bench.server.flush(time_s=0.0)
    assert bench.weight == pytest.approx(-4.0 / 2**0.5), "alone in its buffer, and a version old"
    mixed = Bench([torch.zeros(4, 2), torch.zeros(3).half()], _sgd, aggregate=2, buffer_weights="fedbuff")
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 2), 2.0), (4, 2), check_invariants=False)
    for base in (0, 0, 0, 0):
        mixed.push(0, {0: sparse, 1: torch.full((3,), 2.0).half()}, base=base)
    first, second = mixed.weights
    assert first[1].tolist() == pytest.approx([-2.0 - 2.0**0.5] * 2)
    assert second.float().tolist() == pytest.approx([-2.0 - 2.0**0.5] * 3, rel=1e-3)


def test_fedbuff_weighs_samples_as_well() -> None:
    bench = _one(aggregate=2, buffer_weights="fedbuff", weight_by_samples=True)
    bench.push(0, _of(1.0), samples=1)
    bench.push(1, _of(1.0), samples=3)
    bench.push(0, _of(1.0), samples=1, base=0)
    bench.push(1, _of(1.0), samples=3, base=0)
    assert bench.weight == pytest.approx(-1.0 - 0.5**0.5)


def _nesterov(parameters):
    return [torch.optim.SGD(parameters, lr=0.5, momentum=0.8, nesterov=True)]


def test_delayed_nesterov_applies_each_push_at_once_and_moves_momentum_with_every_kth() -> None:
    bench = Bench([torch.zeros(3)], _nesterov, aggregate=3, delayed=True)
    weight = momentum = summed = 0.0
    for count, g in enumerate([1.0, -2.0, 4.0, 0.5, 3.0, -1.0, 2.0], start=1):
        receipt = bench.push(count % 4, _of(g), base=max(0, count - 3))
        assert receipt.applied
        assert receipt.version == count
        summed += g
        weight -= 0.5 * g / 3
        if count % 3 == 0:
            momentum = 0.8 * momentum + summed / 3
            weight -= 0.5 * 0.8 * momentum
            summed = 0.0
        assert bench.weight == pytest.approx(weight, rel=1e-5)


def test_a_delay_with_one_push_a_move_would_be_sgd_itself() -> None:
    """K equal gradients in a row move the weights as one step of torch's SGD does, weight decay and maximize alike."""
    for extra in ({}, {"weight_decay": 0.1, "maximize": True}):
        theirs = torch.nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True, **extra)
        bench = Bench(
            [torch.ones(3)],
            lambda ps, extra=extra: [torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, **extra)],
            aggregate=2, delayed=True,
        )  # fmt: skip
        for value in (1.0, 2.0, -1.0):
            theirs.grad = torch.full((3,), value)
            sgd.step()
            for rank in (0, 1):
                bench.push(rank, _of(value))
        torch.testing.assert_close(bench.weights[0], theirs.detach(), rtol=0.0, atol=0.02 if extra else 1e-6)


def test_a_delayed_momentum_goes_on_from_a_checkpoint() -> None:
    """The rank's own optimizer carries state and count, as it does in a checkpoint of a real run."""
    straight = Bench([torch.zeros(3)], _nesterov, aggregate=3, delayed=True)
    for value in (1.0, 2.0):
        straight.push(0, _of(value))
    snapshot = straight.server.snapshot()
    parameter = torch.nn.Parameter(straight.weights[0].clone())
    (optimizer,) = _nesterov([parameter])
    (parts,), (evolved,) = snapshot.parts([parameter]), snapshot.evolved
    optimizer.state[parameter] = dict(parts.state[parameter])
    optimizer.param_groups[0].update(evolved[0])
    saved = optimizer.state_dict()

    def resumed(parameters):
        (made,) = _nesterov(parameters)
        made.load_state_dict(saved)
        return [made]

    other = Bench([parameter.detach()], resumed, aggregate=3, delayed=True)
    for value in (-3.0, 5.0, 1.0, 1.0):
        straight.push(0, _of(value))
        other.push(0, _of(value))
        assert other.weight == straight.weight


@pytest.mark.parametrize(
    "make", [lambda ps: [torch.optim.SGD(ps, lr=0.1, momentum=0.9)], lambda ps: [torch.optim.AdamW(ps)]]
)
def test_an_optimizer_without_a_delayed_form_is_refused(make) -> None:
    with pytest.raises(ConfigurationError, match=r"delayed_nesterov=True with optimizer .*nesterov=True"):
        Bench([torch.zeros(3)], make, aggregate=2, delayed=True)


# --- rounds -----------------------------------------------------------------------------------------------------------

WAITS = PushReceipt(version=0, staleness=0, applied=False, buffered=True, waits=True)


def test_a_round_ends_with_its_first_m_pushes_and_then_answers_them() -> None:
    bench = _one(rounds=2, ranks=3)
    assert bench.push(0, _of(1.0)) == WAITS
    assert bench.server.settled() == {}
    assert bench.push(2, _of(5.0)) == PushReceipt(version=1, staleness=0, applied=True)
    assert bench.server.settled() == {(0, 0, 0): PushReceipt(1, 0, applied=True)}
    assert bench.weight == -3.0


def test_a_late_push_is_dropped_counted_apart_and_answered_at_once() -> None:
    bench = _one(rounds=2, ranks=3)
    for rank in (0, 1):
        bench.push(rank, _of(1.0), samples=4)
    receipt = bench.push(2, _of(100.0), base=0, samples=4, energy=1.0)
    assert receipt == PushReceipt(version=1, staleness=1, applied=False, late=True)
    assert 2 not in bench.server.view().window
    bench.push(0, _of(1.0), samples=4)
    assert bench.push(2, _of(1.0), samples=4).applied, "its next push is one of the round"
    assert bench.weight == -2.0
    totals = bench.server.telemetry.totals()[2]
    assert (totals.late, totals.late_samples, totals.rejected, totals.pushes, totals.samples) == (1, 4, 0, 1, 4)
    late = [r for r in bench.server.telemetry.drain() if r.late]
    assert [(r.rank, r.applied, r.rejected, r.staleness, r.version) for r in late] == [(2, False, False, 1, 1)]


def test_a_late_push_that_the_gate_lets_pass_joins_the_round_and_does_not_wait() -> None:
    bench = _one(rounds=2, ranks=3, late="gate")
    for rank in (0, 1):
        bench.push(rank, _of(1.0))
    assert bench.push(2, None, base=0) == PushReceipt(version=1, staleness=1, applied=False), "rejected: no arrival"
    assert bench.push(2, _of(3.0), base=0) == PushReceipt(version=1, staleness=1, applied=False, buffered=True)
    assert bench.push(2, _of(5.0)) == PushReceipt(version=2, staleness=0, applied=True)
    assert bench.weight == -5.0
    assert list(bench.server.settled()) == [(0, 0, 0), (2, 0, 1)]
    assert bench.server.telemetry.totals()[2].late == 0


def test_a_rejected_push_of_the_round_waits_for_its_end() -> None:
    bench = _one(rounds=2, ranks=3)
    assert bench.push(0, None) == replace(WAITS, buffered=False)
    bench.push(1, _of(3.0))
    assert bench.server.settled() == {(0, 0, 0): PushReceipt(version=1, staleness=0, applied=False)}
    assert bench.weight == -3.0
    bench.push(0, None)
    bench.push(1, None)
    assert bench.server.version == 1
    assert list(bench.server.settled()) == [(0, 0, 1)], "a round of nothing ends, too"
    assert bench.push(0, _of(1.0)).waits, "what they come back with is not late"


def test_a_round_ends_when_nobody_is_left_who_could_join_it() -> None:
    bench = _one(rounds=3, ranks=4)
    bench.push(0, _of(2.0))
    bench.push(1, _of(4.0))
    bench.server.close_rounds([2], time_s=0.0)
    assert bench.server.version == 0, "rank 3 still trains"
    bench.server.close_rounds([2, 3], time_s=0.0)
    assert bench.weight == -3.0
    assert len(bench.server.settled()) == 2
    for rank in (0, 1):
        bench.push(rank, _of(1.0))
    bench.server.drop(3, time_s=0.0)
    bench.server.close_rounds([], time_s=0.0)
    assert bench.server.version == 1
    bench.server.drop(2, time_s=0.0)
    assert bench.server.version == 2, "two ranks are left, and both have pushed"


def test_buffers_do_not_end_because_ranks_wait() -> None:
    bench = _one(aggregate=2, ranks=2)
    bench.push(0, _of(1.0))
    bench.server.close_rounds([0, 1], time_s=0.0)
    assert bench.server.version == 0


def test_gradients_of_one_backward_are_late_for_no_optimizer_of_the_module() -> None:
    """The first optimizer's round makes a version before the second one's gradients, of the same weights, are sent."""
    bench = Bench(
        [torch.zeros(1), torch.zeros(1)], lambda ps: [torch.optim.SGD([p], lr=1.0) for p in ps], ranks=2, rounds=2
    )
    for step in range(2):
        base = bench.server.version
        for optimizer in range(2):
            for rank in range(2):
                receipt = bench.push(rank, {optimizer: torch.ones(1)}, optimizer=optimizer, base=base)
                assert not receipt.late
        assert [float(w) for w in bench.weights] == [-1.0 - step, -1.0 - step]
    assert bench.push(0, {0: torch.ones(1)}, base=2).late


def test_optimizers_in_different_rounds_cannot_block_each_other() -> None:
    bench = Bench(
        [torch.zeros(1), torch.zeros(1)], lambda ps: [torch.optim.SGD([p], lr=1.0) for p in ps], ranks=2, rounds=2
    )
    bench.push(0, {0: torch.ones(1)})
    assert bench.push(1, {1: torch.ones(1)}, optimizer=1).waits
    bench.server.close_rounds([], time_s=0.0)
    assert [float(w) for w in bench.weights] == [-1.0, -1.0]
    assert len(bench.server.settled()) == 2
