"""Pushes in several packets: applied as they come, counted once."""

from dataclasses import replace

import pytest
import torch

from lightning_g2.errors import ProtocolError
from lightning_g2.server import OptimizerSpec, ParameterLayout, ServerSetup, ServerState, flatten, hyper_parameters
from lightning_g2.values import PushPacket


class _Job:
    def __init__(self, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, **setup: object) -> None:
        self.optimizer = optimizer
        self.layout = ParameterLayout.of((f"p{i}", p.detach()) for i, p in enumerate(parameters))
        weights = self.layout.allocate()
        flatten(self.layout, [p.detach() for p in parameters], self.layout.all(), weights)
        spec = OptimizerSpec.of(optimizer, {id(p): i for i, p in enumerate(parameters)})
        self.server = ServerState(ServerSetup(self.layout, weights, (spec,), ranks=2, **setup))
        self.sequence = [0, 0]

    def push(self, gradients: dict[int, torch.Tensor], *, rank: int = 0, **fields: object) -> object:
        present = tuple(gradients)
        buffer = self.layout.allocate(present)
        flatten(self.layout, list(gradients.values()), present, buffer)
        packet = PushPacket(
            rank=rank, lane=0, sequence=self.sequence[rank], base_version=0, present=present,
            groups=tuple(hyper_parameters(g) for g in self.optimizer.param_groups),
            whole_bytes=buffer.numel(), sent_bytes=buffer.numel(),
        )  # fmt: skip
        packet = replace(packet, **fields)
        self.sequence[rank] += 1
        return self.server.push(packet, None if packet.rejected else buffer, time_s=0.0)

    def weights(self) -> list[torch.Tensor]:
        return self.layout.views(self.server.weights()[1])


def _two(**setup: object) -> _Job:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return _Job(parameters, torch.optim.SGD(parameters, lr=1.0), **setup)


def test_parts_are_applied_at_once_and_counted_once() -> None:
    job, ones = _two(), torch.ones(2)
    first = job.push({1: ones}, last=False, samples=4, scale={"p1": 3.0})
    assert first.version == 0
    assert torch.equal(job.weights()[1], -ones), "what is handed out now has it, though the version is the same"
    assert job.server.view().window == {}
    assert job.server.telemetry.drain() == []
    last = job.push({0: ones}, samples=4, energy=1.5, weight=0.5, scale={"p0": 2.0}, staleness=2)
    assert (last.version, last.staleness) == (1, 0)
    (record,) = job.server.telemetry.drain()
    assert (record.version, record.samples, record.energy, record.weight) == (1, 4, 1.5, 0.5)
    assert (record.bytes_sent, record.bytes_saved) == (128, 0)
    view = job.server.view()
    assert view.window == {0: pytest.approx(1.5)}, "once, by the whole push's energy"
    assert view.scale == {"p1": 3.0, "p0": 2.0}
    assert job.server.telemetry.totals()[0].samples == 4


def test_a_repeated_part_changes_nothing_and_a_missing_one_is_noticed() -> None:
    job = _two()
    job.push({1: torch.ones(2)}, last=False)
    job.push({1: torch.ones(2)}, last=False, sequence=0)
    assert torch.equal(job.weights()[1], -torch.ones(2))
    with pytest.raises(ProtocolError, match="expects push 1; a push was lost"):
        job.push({0: torch.ones(2)}, sequence=2)


def test_pushes_of_two_ranks_interleave() -> None:
    job, ones = _two(), torch.ones(2)
    for rank in range(2):
        job.push({1: ones}, rank=rank, last=False)
    for rank in range(2):
        assert job.push({0: ones}, rank=rank).version == rank + 1
    assert all(torch.equal(weight, -2 * ones) for weight in job.weights())


def test_a_push_whose_rest_is_rejected_counts_as_rejected_and_moves_the_version() -> None:
    job = _two()
    job.push({1: torch.ones(2)}, last=False, samples=4)
    assert job.push({}, rejected=True, samples=4, whole_bytes=64).version == 1
    (record,) = job.server.telemetry.drain()
    assert (record.rejected, record.bytes_sent, record.bytes_saved) == (True, 64, 64)
    totals = job.server.telemetry.totals()[0]
    assert (totals.samples, totals.pushes, totals.rejected) == (0, 0, 1)


def test_a_last_packet_may_bring_nothing() -> None:
    job = _two()
    job.push({1: torch.ones(2)}, last=False)
    assert job.push({}, samples=4).version == 1
    assert torch.equal(job.weights()[0], torch.zeros(2))
    assert job.server.telemetry.totals()[0].pushes == 1


def test_a_rank_that_leaves_within_a_push_leaves_an_update_behind() -> None:
    job = _two()
    job.push({1: torch.ones(2)}, rank=1, last=False)
    job.server.drop(1, time_s=0.0)
    assert job.server.version == 1
    job.server.drop(0, time_s=0.0)
    assert job.server.version == 1


def test_parts_of_one_push_have_one_weight_by_samples() -> None:
    job = _two(weight_by_samples=True)
    for samples, factor in ((1, 1.0), (3, 1.5)):
        before = [w.clone() for w in job.weights()]
        for index in (1, 0):
            job.push({index: torch.ones(2)}, last=index == 0, samples=samples)
        assert all(torch.equal(b - w, torch.full((2,), factor)) for b, w in zip(before, job.weights(), strict=True))


DENSE = [
    name
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
]  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_a_step_in_parts_is_one_step_bit_for_bit(name: str) -> None:
    """Torch's own optimizers keep nothing that counts steps across parameters."""
    torch.manual_seed(0)
    start = [torch.randn(6, 5), torch.randn(5, 7), torch.randn(4, 4)]
    jobs = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(p.clone()) for p in start]
        jobs.append(_Job(parameters, getattr(torch.optim, name)(parameters, lr=0.01)))
    whole, parts = jobs
    for _ in range(4):
        gradients = {i: torch.randn_like(p) for i, p in enumerate(start)}
        whole.push(gradients)
        parts.push({2: gradients[2]}, last=False)
        parts.push({1: gradients[1], 0: gradients[0]})
    assert whole.server.version == parts.server.version == 4
    assert all(torch.equal(a, b) for a, b in zip(whole.weights(), parts.weights(), strict=True))


def test_parts_are_rounded_into_half_precision_weights_as_they_come() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    job = _Job(parameters, torch.optim.SGD(parameters, lr=1.0), master_dtype=torch.float32)
    small = torch.full((3,), 2.0**-10, dtype=torch.bfloat16)  # below 1 the steps of bfloat16 are four times as large
    for step in range(1, 5):
        job.push({1: small}, last=False)
        rounded = torch.full((3,), 1.0 - step * 2.0**-10).bfloat16()
        assert torch.equal(job.weights()[1], rounded), "handed out before the push is over"
        job.push({0: small})
    assert all(torch.equal(w.float(), torch.full((3,), 1.0 - 2.0**-8)) for w in job.weights())
