"""Gradients in a smaller dtype: what arrives in the end is what was meant, and every byte is counted."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from lightning_g2.server import power_of_two, widened
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.compression import ErrorFeedback
from lightning_g2.transport import LocalTransport, ServerHost
from lightning_g2.values import GateDecision, ServerView

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _received(sent: Mapping[int, Tensor], exponents: Mapping[int, int], own: torch.dtype) -> dict[int, Tensor]:
    return {i: widened(tensor, own, exponents.get(i, 0)) for i, tensor in sent.items()}


@pytest.mark.parametrize("wire", WIRES)
def test_all_that_was_received_is_all_that_was_meant_up_to_one_residual(wire: str) -> None:
    """Gradients are multiples of 2⁻¹⁸ below 16, so float32 adds a residual to them exactly."""
    feedback = ErrorFeedback(WIRES[wire])
    generator = torch.Generator().manual_seed(0)
    meant, received = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    rounded = 0
    for _ in range(50):
        gradient = torch.randint(-(2**20), 2**20, (1000,), generator=generator).float() * 2.0**-18
        sent, exponents = feedback.narrow({3: gradient})
        assert sent[3].dtype == WIRES[wire]
        arrived = _received(sent, exponents, torch.float32)[3]
        rounded += int((arrived != gradient).sum())
        meant += gradient
        received += arrived
        residual = feedback._residuals[3]
        assert torch.equal(meant - received, residual.double()), "to the last bit"
        assert residual.abs().max() <= 4.0 * torch.finfo(WIRES[wire]).eps, "half a step of the largest entry, 8"
    assert rounded > 40_000, "there was something to make up for"


def test_float64_travels_as_float32_and_what_is_no_larger_as_it_is() -> None:
    feedback = ErrorFeedback(torch.float32)
    third = torch.full((4,), 1 / 3, dtype=torch.float64)
    given = {
        0: third, 1: torch.ones(2), 2: torch.ones(2, dtype=torch.bfloat16), 3: torch.ones(2, dtype=torch.complex128),
        4: torch.eye(3, dtype=torch.float64).to_sparse(), 5: torch.zeros(0, dtype=torch.float64),
    }  # fmt: skip
    sent, exponents = feedback.narrow(given)
    assert list(sent) == list(given)
    assert exponents == {}
    assert sent[0].dtype == torch.float32
    assert torch.equal(sent[0].double() + feedback._residuals[0], third)
    for index in range(1, 6):
        assert sent[index] is given[index]
    assert list(feedback._residuals) == [0]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_nothing_becomes_infinite_and_the_largest_entry_never_zero(wire: torch.dtype, own: torch.dtype) -> None:
    """Over the range of the gradient's own dtype, within one step of the wire's."""
    limits = torch.finfo(own)
    for size in (limits.max / 3, 1e30, 70_000.0, 1.0, 1e-8, 1e-30, limits.tiny):
        gradient = torch.tensor([size, -size, size / 7], dtype=own)
        if wire == own or (wire != torch.float16 and size < 1e-30):
            continue  # travels as it is; below the range of float32 and bfloat16 residuals add up until something goes
        sent, exponents = ErrorFeedback(wire).narrow({0: gradient})
        arrived = _received(sent, exponents, own)[0]
        assert arrived.isfinite().all()
        torch.testing.assert_close(arrived, gradient, rtol=1.01 * torch.finfo(wire).eps, atol=0.0)


def test_scaling_by_a_power_of_two_keeps_the_largest_entry_below_the_range_of_float16() -> None:
    assert power_of_two(0.0, torch.float32, torch.float16) == 0
    assert power_of_two(1.0, torch.float32, torch.float16) == 14
    assert power_of_two(65536.0, torch.float32, torch.float16) == -2
    assert power_of_two(3e38, torch.float32, torch.bfloat16) == -1
    assert power_of_two(1e-40, torch.float32, torch.bfloat16) == 0


class _Job:
    """One rank and its server in this process, whose gradients the test makes."""

    def __init__(self, parameters: list[Tensor], *, wire: torch.dtype | None = None, lr: float = 1.0) -> None:
        self.parameters = [torch.nn.Parameter(p) for p in parameters]
        self.host = ServerHost(1)
        self.client = RankClient(
            LocalTransport(self.host, 0), rank=0, ranks=1, prefetch=False, wire=wire,
            named_parameters=lambda: ((f"p{i}", p) for i, p in enumerate(self.parameters)),
            optimizers=[torch.optim.SGD(self.parameters, lr=lr)],
        )  # fmt: skip
        self.client.configure()
        self.client.begin()

    def push(self, gradients: list[Tensor], gate: Callable[[Mapping[str, Tensor]], GateDecision] | None = None) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

        def route(named: Mapping[str, Tensor], view: ServerView, staleness: int) -> GateDecision:
            return GateDecision(named) if gate is None else gate(named)

        self.client.push(0, route, samples=1, needs_view=False)


@pytest.mark.parametrize(("wire", "epsilon"), [("bf16", 5e-4), ("fp16", 1e-4)])
def test_error_feedback_beats_rounding_where_gradients_are_tiny_beside_their_noise(wire: str, epsilon: float) -> None:
    """½ε(w-1)² and noise of ±1 that averages out: rounded, the gradient is the noise alone, and w stays where it is."""
    feedback = ErrorFeedback(WIRES[wire])

    def descend(rounded: bool, kept: bool) -> float:
        w, before = torch.zeros(1), torch.zeros(1)
        for step in range(4000):
            gradient, before = epsilon * (w - 1.0) + (-1.0) ** step, w.clone()
            if rounded:
                sent, exponents = feedback.narrow({0: gradient})
                gradient = _received(sent, exponents, torch.float32)[0]
            w -= gradient
            if not kept:
                feedback.reset()
        return float(w + before) / 2 + 0.5  # the noise moves w to and fro between 0 and -1

    exact = descend(rounded=False, kept=False)
    assert exact > 0.3, "of the way to where the noise leaves it"
    assert abs(descend(rounded=True, kept=True) - exact) < 0.02
    feedback.reset()
    assert descend(rounded=True, kept=False) == 0.0


def test_what_is_rejected_or_damped_is_not_made_up_for() -> None:
    job = _Job([torch.zeros(4)], wire=torch.bfloat16)
    fine = torch.full((4,), 1.0 + 2.0**-12)  # bfloat16 makes 1 of it
    job.push([fine.clone()])
    assert torch.equal(job.client._feedback._residuals[0], torch.full((4,), 2.0**-12))
    job.push([fine.clone()], lambda named: GateDecision(named, rejected=True, reason="for the test"))
    assert torch.equal(job.parameters[0], torch.full((4,), -1.0))
    assert torch.equal(job.client._feedback._residuals[0], torch.full((4,), 2.0**-12)), "kept, and nothing added"
    job.push([fine.clone()], lambda named: GateDecision({name: 0.5 * g for name, g in named.items()}))
    assert torch.equal(job.parameters[0], torch.full((4,), -1.5))
    assert torch.equal(job.client._feedback._residuals[0], torch.full((4,), 2.0**-12 + 2.0**-13)), "of what was sent"


def test_every_byte_is_counted() -> None:
    shapes = [torch.zeros(1000), torch.zeros(320, dtype=torch.float64), torch.zeros(64, dtype=torch.bfloat16)]
    ones = [torch.ones_like(p) for p in shapes]
    whole = 4032 + 2560 + 128  # each on a multiple of 64 bytes
    plain = _Job([p.clone() for p in shapes])
    plain.push([g.clone() for g in ones])
    totals = plain.host.totals()[0]
    assert (totals.bytes_sent, totals.bytes_saved) == (whole, 0)
    half = _Job([p.clone() for p in shapes], wire=torch.float16)
    half.push([g.clone() for g in ones])
    half.push([g.clone() for g in ones], lambda named: GateDecision(named, rejected=True, reason="for the test"))
    sent = 2048 + 640 + 128
    records = half.host.drain()
    assert [(r.bytes_sent, r.bytes_saved) for r in records] == [(sent, whole - sent), (0, whole)]
    totals = half.host.totals()[0]
    assert (totals.bytes_sent, totals.bytes_saved) == (sent, 2 * whole - sent)
    for job in (plain, half):
        for parameter in job.parameters:
            assert torch.equal(parameter, -torch.ones_like(parameter)), "ones survive any rounding"
