"""Several pushes a version: what a buffer of K and a synchronous round apply, when, and what each push is told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from lightning_g2.server import (
    Aggregation,
    OptimizerSpec,
    ParameterLayout,
    ServerSetup,
    ServerState,
    flatten,
    flatten_gradients,
    hyper_parameters,
)
from lightning_g2.values import PushPacket, PushReceipt, SparseShape


class Bench:
    """A server fed by hand; ``make`` gives the optimizers of the parameters."""

    def __init__(self, parameters, make, *, ranks=4, aggregate=1, rounds=None, late="drop", **setup) -> None:
        self.parameters = [torch.nn.Parameter(p) for p in parameters]
        self.optimizers = make(self.parameters)
        layout = ParameterLayout.of((f"p{i}", p.detach()) for i, p in enumerate(self.parameters))
        weights = layout.allocate()
        flatten(layout, [p.detach() for p in self.parameters], layout.all(), weights)
        index = {id(p): i for i, p in enumerate(self.parameters)}
        specs = tuple(OptimizerSpec.of(o, index) for o in self.optimizers)
        how = Aggregation(aggregate=aggregate, rounds=rounds, late=late)
        self.server = ServerState(ServerSetup(layout, weights, specs, ranks, aggregation=how, **setup))
        self.sequence = [0] * ranks

    def push(self, rank, gradients, *, base=None, optimizer=0, **fields) -> PushReceipt:
        """Push gradients by index; None instead of them is a rejected push. The buffer is ruined afterwards."""
        rejected, gradients = gradients is None, gradients or {}
        sparse = {i: SparseShape(g.sparse_dim(), g._nnz(), g.is_coalesced()) for i, g in gradients.items() if g.is_sparse}
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
    assert [(r.rank, r.version, r.staleness) for r in bench.server.telemetry.drain()] == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
