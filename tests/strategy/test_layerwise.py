"""Layer-wise pushes: what they refuse, what they share with whole pushes, and that they lose nothing."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy, G2RoutingCallback, StragglerCallback
from lightning_g2.errors import ConfigurationError
from lightning_g2.routing import Gate, GateContext, GateDecision, build_gate
from lightning_g2.server import ParameterLayout
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.layerwise import LayerwisePush, plan_buckets
from lightning_g2.strategy.layerwise_refusal import (
    refuse_gate_of_whole_pushes,
    refuse_stepping_in_parts,
    refuse_whole_gradients,
)
from lightning_g2.transport import LocalTransport, ServerHost, ShardedTransport, Transport
from lightning_g2.values import ServerView


class _Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _ChangesGradients(_Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at all gradients."""


class _ClipsByHand(_Plain):
    def configure_gradient_clipping(self, *_: object, **__: object) -> None:
        """Clips in its own way."""


class _ByHand(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _OwnOptimizer(torch.optim.SGD):
    """Might count its steps."""


def _trainer(**options: object) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    return pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **(quiet | options))


@pytest.mark.parametrize(
    ("options", "module", "match"),
    [
        ({"accumulate_grad_batches": 2}, _Plain, "accumulate_grad_batches=2: a gradient is whole only after several"),
        ({"callbacks": [GradientAccumulationScheduler({2: 4})]}, _Plain, "GradientAccumulationScheduler: a gradient"),
        ({"gradient_clip_val": 1.0}, _Plain, "gradient_clip_val=1.0 by norm: .* gradient_clip_algorithm='value'"),
        ({}, _ByHand, "manual optimization: only the module knows"),
        ({}, _ChangesGradients, "_ChangesGradients.on_before_optimizer_step: it may change"),
        ({}, _ClipsByHand, "_ClipsByHand.configure_gradient_clipping"),
        ({"callbacks": [LambdaCallback(on_after_backward=print)]}, _Plain, "LambdaCallback.on_after_backward"),
    ],
)
def test_what_needs_whole_gradients_is_refused_with_advice(options: dict, module: type, match: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{match}.*use push='whole'"):
        refuse_whole_gradients(_trainer(**options), module())


def test_what_does_not_need_them_is_not_refused() -> None:
    refuse_whole_gradients(
        _trainer(
            gradient_clip_val=1.0,
            gradient_clip_algorithm="value",
            callbacks=[StragglerCallback(rank=0, factor=2.0), LambdaCallback()],
        ),
        _Plain(),
    )
    refuse_gate_of_whole_pushes(build_gate("none"))
    refuse_gate_of_whole_pushes(build_gate("g2"))
    refuse_stepping_in_parts([torch.optim.AdamW(nn.Linear(2, 1).parameters())])


def test_a_gradient_scaler_is_refused() -> None:
    trainer = _trainer()
    trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(MisconfigurationException, match=r"its GradScaler looks at all gradients.*use 'bf16-mixed'"):
        refuse_whole_gradients(trainer, _Plain())


def test_optimizers_and_gates_that_see_a_push_as_a_whole_are_refused() -> None:
    parameters = list(nn.Linear(2, 1).parameters())
    hooked = torch.optim.SGD(parameters)
    hooked.register_step_pre_hook(lambda *_: None)
    for optimizers, match in (
        ([torch.optim.SGD(parameters), torch.optim.SGD(parameters)], "2 optimizers: a backward may bring"),
        ([_OwnOptimizer(parameters)], "optimizer _OwnOptimizer: each bucket is a step on some of the parameters"),
        ([hooked], "optimizer SGD with step pre-hooks: they run after"),
    ):
        with pytest.raises(MisconfigurationException, match=match):
            refuse_stepping_in_parts(optimizers)
    with pytest.raises(MisconfigurationException, match=r"gate g2 \(adaptive scalar.*it decides on a push as a whole"):
        refuse_gate_of_whole_pushes(build_gate("g2", action="scalar"))


def test_a_refusal_comes_before_the_server_starts() -> None:
    data = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    layerwise = G2AsyncStrategy(push="layerwise")
    trainer = _trainer(strategy=layerwise, callbacks=[G2RoutingCallback("g2", action="scalar")])
    with pytest.raises(MisconfigurationException, match="it decides on a push as a whole"):
        trainer.fit(_Plain(), data)
    assert layerwise._session is None


def test_buckets_are_filled_in_the_order_of_gradients() -> None:
    layout = ParameterLayout.of((f"p{i}", torch.zeros(size)) for i, size in enumerate((16, 16, 64, 16, 16)))
    buckets = plan_buckets(layout, (4, 3, 2, 1, 0), bucket_bytes=128)
    assert [bucket.indices for bucket in buckets] == [(4, 3), (2,), (1, 0)], "one larger than a bucket is its own"
    assert [bucket.offset for bucket in buckets] == [0, 128, 128 + 256]
    assert plan_buckets(layout, (), bucket_bytes=128) == []


class _Rank:
    """A rank with a small network, its gate, and its end of the protocol, in this process."""

    def __init__(
        self, hosts: list[ServerHost], rank: int, gate: Gate, *, layerwise: bool, wire: torch.dtype | None = None
    ) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6))
        self.host, self.rank, self.gate, self.seed = hosts[0], rank, gate, 100 * rank
        servers: list[Transport] = [LocalTransport(host, rank) for host in hosts]
        self.client = RankClient(
            servers[0] if len(servers) == 1 else ShardedTransport(servers), rank=rank, ranks=2, prefetch=False,
            wire=wire, named_parameters=self.net.named_parameters,
            optimizers=[torch.optim.SGD(self.net.parameters(), lr=0.5)],
        )  # fmt: skip
        self.decisions: list[GateDecision] = []
        self.pusher = LayerwisePush(
            self.client, route=lambda: self.route, samples=lambda: 3, needs_view=lambda: True, bucket_bytes=512
        ) if layerwise else None  # fmt: skip

    def route(self, named: Mapping[str, Tensor], view: ServerView, staleness: int) -> GateDecision:
        context = GateContext(
            rank=self.rank, staleness=staleness, concurrency=2, lr=0.5, version=view.version, window=view.window,
            scale=view.scale,
        )  # fmt: skip
        self.decisions.append(self.gate.decide(named, context))
        return self.decisions[-1]

    def step(self, spoil: int | None = None) -> None:
        self.decisions.clear()
        self.seed += 1
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(self.seed))
        for parameter in self.net.parameters():
            parameter.grad = None
        loss = self.net(x).square().mean()
        if spoil is not None:
            weight = self.net[spoil].weight
            handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        if self.pusher is None:
            loss.backward()
            self.client.push(0, self.route, samples=3, needs_view=True)
        else:
            self.pusher.begin_backward()
            loss.backward()
            self.pusher.end_backward()
            self.pusher.step()
        if spoil is not None:
            handle.remove()


@pytest.fixture
def job() -> Iterator[Callable[..., list[_Rank]]]:
    ranks: list[_Rank] = []

    def start(
        *, layerwise: bool, gate: str = "g2", servers: int = 1, wire: torch.dtype | None = None, **options: object
    ) -> list[_Rank]:
        hosts = [ServerHost(2) for _ in range(servers)]
        ranks.extend(
            _Rank(hosts, rank, build_gate(gate, **options), layerwise=layerwise, wire=wire) for rank in range(2)
        )
        ours = ranks[-2:]
        ours[0].client.configure()
        for rank in ours:
            rank.client.begin()
        return ours

    yield start
    for rank in ranks:
        if rank.pusher is not None:
            rank.pusher.remove()


def test_the_gate_gives_every_block_what_it_gives_it_in_a_whole_push(job: Callable) -> None:
    """Stale pushes of two ranks, damped along their ridges: weights are equal bit for bit, the counts as well."""
    jobs = [job(layerwise=layerwise, beta=0.5, bounded_delay=None) for layerwise in (False, True)]
    for ranks in jobs:
        for _ in range(5):
            ranks[0].step()
            for _ in range(3):
                ranks[1].step()
    whole, parts = (ranks[0].host for ranks in jobs)
    assert len(jobs[0][0].decisions) == 1
    assert len(jobs[1][0].decisions) == 3, "one for each bucket"
    assert torch.equal(whole.pull().buffer, parts.pull().buffer)
    assert whole.view().version == parts.view().version == 20
    one, other = whole.drain(), parts.drain()
    assert any(record.weight < 0.99 for record in one), "the gate did something"
    for a, b in zip(one, other, strict=True):
        assert (a.rank, a.version, a.staleness, a.samples) == (b.rank, b.version, b.staleness, b.samples)
        assert (a.bytes_sent, a.bytes_saved) == (b.bytes_sent, b.bytes_saved)
        assert (a.energy, a.weight) == (pytest.approx(b.energy), pytest.approx(b.weight))
    assert whole.view().window == pytest.approx(parts.view().window)
    assert whole.view().scale == parts.view().scale


@pytest.mark.parametrize("wire", [None, torch.float16])
def test_several_servers_take_buckets_in_like_one(job: Callable, wire: torch.dtype | None) -> None:
    jobs = [job(layerwise=True, servers=servers, wire=wire, bounded_delay=None) for servers in (1, 2)]
    for ranks in jobs:
        for _ in range(3):
            for rank in (*ranks, ranks[1]):
                rank.step()
        ranks[0].step(spoil=2)
        ranks[0].step()
    (one, _), (several, _) = jobs
    for name, parameter in one.net.named_parameters():
        assert torch.equal(parameter, several.net.get_parameter(name))
    totals = [rank.host.totals() for rank in (one, several)]
    assert totals[0] == totals[1]
    assert (totals[0][0].pushes, totals[0][0].rejected) == (4, 1)
    assert several.host.view().version == 11
    saved = totals[0][1].bytes_saved
    assert saved > 0 if wire else saved == 0


def test_nan_in_a_late_bucket_rejects_it_and_all_later_ones(job: Callable) -> None:
    first, second = job(layerwise=True, gate="none")
    first.step()
    before = {name: p.detach().clone() for name, p in first.net.named_parameters()}
    first.step(spoil=2)
    moved = {name for name, p in first.net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"4.weight", "4.bias", "2.bias"}, "the first bucket was applied before NaN came"
    assert all(p.isfinite().all() for p in first.net.parameters())
    totals = first.host.totals()[0]
    assert (totals.pushes, totals.rejected, totals.samples) == (1, 1, 3)
    assert totals.bytes_sent + totals.bytes_saved == 2 * first.client.layout.size_bytes()
    assert first.host.view().version == 2
    first.step()
    second.step()
    assert first.host.totals()[0].pushes == 2
    assert first.host.view().version == 4


def test_a_push_whose_every_bucket_is_rejected_is_a_rejected_push(job: Callable) -> None:
    first, second = job(layerwise=True, weight_rule="constant", constant=0.0, bounded_delay=1.0)
    for rank in (first, second):
        rank.step()  # the first one tells the order
    for _ in range(4):
        second.step()
    before = first.host.pull().buffer.clone()
    first.host.drain()
    first.step()
    assert all(decision.rejected for decision in first.decisions)
    (record,) = first.host.drain()
    assert record.rejected
    assert (record.bytes_sent, record.bytes_saved) == (0, first.client.layout.size_bytes())
    assert record.energy > 0.0
    assert torch.equal(first.host.pull().buffer, before)


def test_two_gradients_for_one_parameter_in_one_backward_are_refused(job: Callable) -> None:
    first, _ = job(layerwise=True)
    assert first.pusher is not None
    first.step()
    loss = first.net(torch.ones(2, 8)).sum()
    first.pusher.begin_backward()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigurationError, match=r"was given a gradient twice in one backward.*use push='whole'"):
        loss.backward()


def test_a_backward_outside_the_step_pushes_nothing(job: Callable) -> None:
    first, _ = job(layerwise=True)
    for _ in range(2):
        first.step()
    first.net(torch.ones(2, 8)).sum().backward()
    assert first.host.view().version == 2
    assert not first.client.pushing


def test_one_rank_is_plain_lightning_bit_for_bit(run_job: Callable, tmp_path: Path) -> None:
    """Tied, sparse, sometimes unused and frozen parameters, BatchNorm, a schedule, clipping by value; default gate."""
    job = run_job("layerwise_alone.py", tmp_path)
    assert job.code == 0, job.output
    assert job.left == ()
    for facts in json.loads((tmp_path / "facts.json").read_text()).values():
        assert facts["unequal"] == []
        assert facts["learned"]
        assert facts["steps"] == [12, 12]
        steps = [[size for base, size, _ in facts["packets"] if base == step] for step in range(12)]
        assert len(steps[0]) == 1, "the first backward tells the order"
        assert all(len(packets) >= 4 for packets in steps[1:]), "several buckets of each backward"
        assert [last for *_, last in facts["packets"]].count(True) == 12


def test_no_bucket_is_lost_doubled_or_torn(run_job: Callable, tmp_path: Path) -> None:
    job = run_job("layerwise_ranks.py", tmp_path)
    assert job.code == 0, job.output
    assert job.left == ()
    for rank in range(2):
        for name, facts in json.loads((tmp_path / f"rank{rank}.json").read_text()).items():
            assert facts["values"] == [-80.0]
            assert facts["uniform"], "a tensor of two versions"
            assert facts["version"] == 80
            assert set(facts["pushes"].values()) == set(facts["samples"].values()) == {40}
            sent, saved = facts["bytes"]
            assert sent + saved == 80 * 5 * 200_000
            assert sent == (sent + saved if name == "shm" else 80 * 5 * 100_032), "half of it on multiples of 64 bytes"
