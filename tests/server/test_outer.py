"""The server's optimizer for differences: against the formulas, and over a stop and a resume."""

import pytest
import torch

from lightning_g2.server import (
    OptimizerSpec,
    OuterStep,
    ParameterLayout,
    ServerSetup,
    ServerState,
    flatten,
    outer_state,
)
from lightning_g2.values import PushPacket

DELAYED = OuterStep(name="delayed_nesterov", lr=0.5, momentum=0.8, delay=3)
NESTEROV = OuterStep(name="nesterov", lr=0.7, momentum=0.9)


class Server:
    """A state with two parameters, ``a`` (3,) and ``b`` (2, 2), in float64; differences are pushed one by one."""

    def __init__(self, outer: OuterStep, start: ServerState | None = None, *, weighted: bool = False) -> None:
        self.outer, self.sequence = outer, 0
        values = [torch.linspace(-1.0, 1.0, 3, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)]
        self.layout = ParameterLayout.of(zip("ab", values, strict=True))
        buffer = self.layout.allocate()
        flatten(self.layout, values, self.layout.all(), buffer)
        kept = None
        if start is not None:
            snapshot = start.snapshot()
            buffer, kept = snapshot.weights, outer_state(snapshot)
        named = {name: torch.nn.Parameter(value) for name, value in zip("ab", values, strict=True)}
        optimizer = outer.build(named, kept)
        spec = OptimizerSpec.of(optimizer, {id(p): i for i, p in enumerate(named.values())})
        self.state = ServerState(ServerSetup(self.layout, buffer, (spec,), 1, weight_by_samples=weighted))

    def push(self, differences: dict[int, torch.Tensor], *, steps: int = 4, samples: int = 8) -> None:
        present = tuple(differences)
        buffer = self.layout.allocate(present)
        flatten(self.layout, list(differences.values()), present, buffer)
        packet = PushPacket(
            0, 0, self.sequence, self.state.version, groups=(self.outer.hyper_parameters(),), members=((0, 1),),
            present=present, steps=steps, samples=samples,
        )  # fmt: skip
        self.state.push(packet, buffer, time_s=0.0)
        self.sequence += 1

    @property
    def weights(self) -> list[torch.Tensor]:
        return self.layout.views(self.state.weights()[1])


def differences(count: int, seed: int = 0) -> list[dict[int, torch.Tensor]]:
    """Pushes of which every third leaves ``b`` where it is."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for push in range(count):
        a = torch.randn(3, dtype=torch.float64, generator=generator)
        b = torch.randn(2, 2, dtype=torch.float64, generator=generator)
        made.append({0: a} if push % 3 == 1 else {0: a, 1: b})
    return made


def by_hand(outer: OuterStep, weights: list[torch.Tensor], pushes: list[dict[int, torch.Tensor]]) -> list[torch.Tensor]:
    """The formulas, written down one element type at a time."""
    weights = [w.clone() for w in weights]
    momentum, summed = [0.0, 0.0], [0.0, 0.0]
    eta, beta, k = outer.lr, outer.momentum, outer.delay
    for count, push in enumerate(pushes, start=1):
        for i, g in push.items():
            if outer.name == "nesterov":
                momentum[i] = beta * momentum[i] + g
                weights[i] = weights[i] - eta * (g + beta * momentum[i])
                continue
            summed[i] = summed[i] + g
            if count % k == 0:
                momentum[i] = beta * momentum[i] + summed[i] / k
                weights[i] = weights[i] - eta * (beta * momentum[i] + g / k)
                summed[i] = 0.0
            else:
                weights[i] = weights[i] - eta * g / k
    return weights


@pytest.mark.parametrize(
    "outer", [NESTEROV, DELAYED, OuterStep(name="nesterov", lr=0.3, momentum=0.0)], ids=["nesterov", "delayed", "-"]
)
def test_weights_move_by_the_formulas(outer: OuterStep) -> None:
    server, pushes = Server(outer), differences(8)
    expected = by_hand(outer, server.weights, pushes)
    for push in pushes:
        server.push(push)
    for moved, by_formula in zip(server.weights, expected, strict=True):
        torch.testing.assert_close(moved, by_formula, rtol=1e-12, atol=1e-12)


def test_a_delay_of_one_is_nesterov_momentum() -> None:
    one, other = Server(OuterStep(momentum=0.9, delay=1)), Server(NESTEROV)
    for push in differences(6):
        one.push(push)
        other.push(push)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outer", [NESTEROV, DELAYED], ids=["nesterov", "delayed"])
@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_server_that_starts_from_what_another_kept_goes_on_as_that_one(outer: OuterStep, stop: int) -> None:
    straight, pushes = Server(outer), differences(10)
    for push in pushes[:stop]:
        straight.push(push)
    resumed = Server(outer, straight.state)
    for push in pushes[stop:]:
        straight.push(push)
        resumed.push(push)
    assert all(torch.equal(a, b) for a, b in zip(straight.weights, resumed.weights, strict=True))
    assert not torch.equal(straight.weights[0], Server(outer).weights[0])


def test_what_is_kept_is_tensors_by_name_and_a_count() -> None:
    server = Server(DELAYED)
    server.push({0: torch.ones(3, dtype=torch.float64)})
    kept = outer_state(server.state.snapshot())
    assert kept["pushes"] == 1
    assert {name: set(state) for name, state in kept["state"].items()} == {"a": {"momentum_buffer", "accumulated"}}


def test_a_push_that_moves_nothing_is_a_push() -> None:
    server = Server(NESTEROV)
    before = [w.clone() for w in server.weights]
    server.push({})
    assert server.state.version == 1
    assert all(torch.equal(a, b) for a, b in zip(before, server.weights, strict=True))


def test_differences_weighted_by_samples_count_samples_a_step() -> None:
    """Rounds of as many samples a step count alike, however many steps they have; the third has three times them."""
    server, one = Server(OuterStep(lr=1.0, momentum=0.0), weighted=True), torch.ones(3, dtype=torch.float64)
    start = server.weights[0].clone()
    for steps, samples in ((4, 8), (1, 2), (5, 30)):
        server.push({0: one}, steps=steps, samples=samples)
    mean = (8 / 4 + 2 / 1 + 30 / 5) / 3
    torch.testing.assert_close(server.weights[0], start - (1 + 1 + 6 / mean), rtol=1e-12, atol=1e-12)
