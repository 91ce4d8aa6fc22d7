"""Steps that ranks make themselves: one rank's end of it in this process, and whole fits in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_g2.callbacks.routing import G2RoutingCallback
from lightning_g2.server import OuterStep, outer_state
from lightning_g2.strategy.client import RankClient
from lightning_g2.strategy.local_steps import LocalStep, LocalSteps
from lightning_g2.strategy.nonfinite import NonFiniteGradients
from lightning_g2.strategy.router import PushRouter
from lightning_g2.transport import LocalTransport, ServerHost
from lightning_g2.values import GateDecision

ROOT = Path(__file__).resolve().parents[2]
AS_IT_IS = OuterStep(name="nesterov", lr=1.0, momentum=0.0)


class Rank:
    """A module and its optimizers, stepping here and pushing to a server of the same process."""

    def __init__(
        self, host: ServerHost, rank: int, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *,
        every: int = 4, outer: OuterStep = AS_IT_IS, admit: Callable[[dict[str, torch.Tensor]], bool] = bool,
    ) -> None:  # fmt: skip
        self.module, self.optimizers, self.pushed = module, optimizers, []
        self.client = RankClient(
            LocalTransport(host, rank), rank=rank, ranks=2, named_parameters=module.named_parameters,
            optimizers=optimizers, prefetch=False, outer=outer,
        )  # fmt: skip
        self.local = self.client.local = LocalSteps(every, self._push)
        self.proxies = [
            LocalStep(optimizer, index, self.local, partial(self._admit, index, admit))
            for index, optimizer in enumerate(optimizers)
        ]

    def begin(self) -> None:
        if self.client._rank == 0:
            self.client.configure()
        self.client.begin()
        for proxy in self.proxies:
            proxy.install()

    def train(self, windows: int, loss: Callable[[torch.nn.Module], torch.Tensor]) -> None:
        for _ in range(windows):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss(self.module).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.local.close_window(samples=1)

    def _admit(self, index: int, admit: Callable[[dict[str, torch.Tensor]], bool]) -> bool:
        return self.client.renew() and admit(self.client.by_name(self.client.gradients(index)))

    def _push(self, steps: int, samples: int) -> None:
        self.pushed.append((steps, samples))
        self.client.push_difference(self._route, steps=steps, samples=samples, needs_view=True)

    def _route(self, gradients, view, staleness) -> GateDecision:
        self.routed = dict(gradients)
        return GateDecision(gradients)


@pytest.fixture
def host() -> ServerHost:
    return ServerHost(2)


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def fit_ones(module: torch.nn.Module) -> torch.Tensor:
    return (module(torch.ones(2, 3)) - 1).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_rank_alone_steps_as_the_optimizer_itself_does(host, kind) -> None:
    """Moments stay on the rank from push to push; the server takes the differences as they are."""
    options = {"lr": 0.05, "fused": True}
    alone, module = net(), net()
    rank = Rank(host, 0, module, [kind(module.parameters(), **options)])
    rank.begin()
    rank.train(10, fit_ones)
    optimizer = kind(alone.parameters(), **options)
    for _ in range(10):
        optimizer.zero_grad()
        fit_ones(alone).backward()
        optimizer.step()
    assert (rank.pushed, rank.local.unpushed) == ([(4, 4), (4, 4)], 2)
    rank.client.settle()
    assert rank.pushed[-1] == (2, 2)
    torch.testing.assert_close(list(module.parameters()), list(alone.parameters()))
    assert host.pull().version == 3
    for p, q in zip(alone.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(rank.optimizers[0].state[q], optimizer.state[p])


def test_two_ranks_add_their_differences(host) -> None:
    modules = [torch.nn.Linear(3, 1, bias=False) for _ in range(2)]
    ranks = [Rank(host, i, m, [torch.optim.SGD(m.parameters(), lr=0.5)]) for i, m in enumerate(modules)]
    with torch.no_grad():
        modules[0].weight.zero_()
    for rank in ranks:
        rank.begin()
    ranks[0].train(3, lambda m: m.weight.sum())
    ranks[1].train(4, lambda m: m.weight.sum())
    assert torch.equal(modules[1].weight, torch.full((1, 3), -2.0)), "rank 0's steps are still its own"
    ranks[0].train(1, lambda m: m.weight.sum())
    assert torch.equal(modules[0].weight, torch.full((1, 3), -4.0))
    records = host.drain()
    assert [(r.rank, r.staleness, r.samples) for r in records] == [(1, 0, 4), (0, 1, 4)]


class Awkward(torch.nn.Module):
    """A frozen, an unused, a float, a complex, an integer and a sparsely trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.real = torch.nn.Parameter(torch.ones(2))
        self.rotor = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.count = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.table = torch.nn.Embedding(5, 2, sparse=True)

    def loss(self) -> torch.Tensor:
        return (self.real * self.rotor.imag).sum() + self.rotor.real.sum() + self.table(torch.tensor([1, 3])).sum()


def test_what_has_not_moved_is_not_sent(host) -> None:
    module, plain = Awkward(), Awkward()
    plain.load_state_dict(module.state_dict())

    def optimizers(m: Awkward) -> list[torch.optim.Optimizer]:
        dense = [p for n, p in m.named_parameters() if not n.startswith("table")]
        return [torch.optim.AdamW(dense, weight_decay=0.1), torch.optim.SparseAdam(m.table.parameters())]

    rank = Rank(host, 0, module, optimizers(module), every=2)
    rank.begin()
    rank.train(2, Awkward.loss)
    assert set(rank.routed) == {"real", "rotor", "table.weight"}
    assert rank.pushed == [(4, 2)], "two optimizers, two windows"
    steppers = optimizers(plain)
    for _ in range(2):
        for optimizer in steppers:
            optimizer.zero_grad()
        plain.loss().backward()
        for optimizer in steppers:
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
    for name in ("frozen", "unused", "count"):
        assert torch.equal(module.state_dict()[name], plain.state_dict()[name])
    assert set(outer_state(host.snapshot())["state"]) == set(), "no momentum, nothing to keep"


def test_weights_that_code_changes_are_set_between_rounds_and_part_of_the_difference_within(host) -> None:
    module = Awkward()
    optimizer = torch.optim.SGD([module.real, module.count], lr=0.0)
    rank = Rank(host, 0, module, [optimizer], every=3, outer=OuterStep(lr=0.5, momentum=0.0))
    rank.begin()
    with torch.no_grad():
        module.real.fill_(5.0)
    rank.client.settle()
    assert torch.equal(rank.client.layout.views(host.pull().buffer)[0], torch.full((2,), 5.0))
    assert (host.pull().version, rank.pushed) == (0, []), "an edit is no push"
    rank.train(1, lambda m: m.real.sum())
    with torch.no_grad():
        module.real.fill_(7.0)
        module.count.fill_(9)
    assert not rank.client.send_edits(), "who has changed what can no longer be told"
    rank.client.settle()
    assert torch.equal(module.real, torch.full((2,), 6.0)), "half of the way from 5 to 7"
    assert torch.equal(module.count, torch.full((2,), 9)), "integers have no half"


def test_nan_moves_neither_weights_nor_moments_of_a_rank(host, caplog) -> None:
    module = torch.nn.Linear(2, 1)
    calls: list[str] = []
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    rank = Rank(host, 0, module, [optimizer], every=2, admit=lambda gradients: router.admit(gradients, step=1))
    nonfinite = NonFiniteGradients("reject", rank=0)
    router = PushRouter(G2RoutingCallback("none"), rank.client, nonfinite, rank=0, ranks=2)
    rank.begin()
    scale = [1.0]

    def closure() -> torch.Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = module(torch.ones(1, 2)).sum() * scale[0]
        loss.backward()
        return loss

    assert torch.is_tensor(optimizer.step(closure))
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    before = [p.detach().clone() for p in module.parameters()]
    scale[0] = float("nan")
    optimizer.step(closure=closure)
    assert calls == ["pre", "closure", "post"] * 2
    assert "NaN or Inf in the gradient of weight, bias; the rank steps without it" in caplog.text
    assert nonfinite.count == 1
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    torch.testing.assert_close(dict(optimizer.state), moments, rtol=0, atol=0)
    assert module.weight.grad is not None, "who looks at the gradient sees it"
    rank.local.close_window(samples=2)
    assert rank.pushed == [(2, 2)]
    for proxy in rank.proxies:
        proxy.remove()
    assert "step" not in vars(optimizer)


def test_steps_within_a_step_are_part_of_it(host) -> None:
    module = torch.nn.Linear(2, 1)
    base = torch.optim.SGD(module.parameters(), lr=0.1)

    class Wrapped(torch.optim.SGD):
        def step(self, closure=None):
            return base.step(closure)

    optimizer = Wrapped(module.parameters(), lr=0.1)
    rank = Rank(host, 0, module, [optimizer])
    rank.proxies.append(LocalStep(base, 0, rank.local, lambda: True))
    rank.begin()
    rank.train(1, fit := lambda m: m(torch.ones(1, 2)).sum())
    assert rank.local.unpushed == 1
    fit(module).backward()
    base.step()
    assert rank.local.unpushed == 2, "stepped by itself it counts"


def test_a_group_added_while_steps_are_unpushed_loses_none_of_them(host) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    module[1].requires_grad_(False)
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.9)
    rank = Rank(host, 0, module, [optimizer], every=4)
    rank.begin()
    loss = lambda m: m(torch.ones(1, 2)).sum()  # noqa: E731
    rank.train(2, loss)
    stepped = module[0].weight.detach().clone()
    module[1].requires_grad_(True)
    optimizer.add_param_group({"params": module[1].parameters(), "lr": 0.2})
    new = module[1].weight.detach().clone()
    loss(module).backward()
    gradient = module[1].weight.grad.clone()
    optimizer.step()
    assert rank.pushed == [(2, 2)], "what was done before the group came"
    torch.testing.assert_close(module[1].weight.detach(), new - 0.2 * gradient)
    assert not torch.equal(module[0].weight, stepped)
    rank.client.settle()
    assert {"1.weight", "1.bias"} <= set(rank.routed)


def test_a_refused_difference_is_taken_back_from_the_rank(host) -> None:
    module = torch.nn.Linear(2, 1)
    rank = Rank(host, 0, module, [torch.optim.SGD(module.parameters(), lr=0.1)], every=2)
    rank._route = lambda gradients, view, staleness: GateDecision(gradients, rejected=True)
    rank.begin()
    before = module.weight.detach().clone()
    rank.train(2, lambda m: m(torch.ones(1, 2)).sum())
    assert torch.equal(module.weight, before)
    assert host.totals()[0].rejected == 1


# --- whole fits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    """What both ranks wrote about one of the fits of ``tests/scripts/local_steps.py two``."""
    out = run_script("two", tmp_path_factory.mktemp("two"))

    def read(name: str) -> list[dict]:
        return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)]

    read.folder = out
    return read


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``tests/scripts/local_steps.py one``."""
    return run_script("one", tmp_path_factory.mktemp("one"))


def run_script(mode: str, out: Path) -> Path:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "local_steps.py"), mode, str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def facts_of(one: Path) -> dict:
    return json.loads((one / "facts.json").read_text())


@pytest.mark.parametrize(
    ("name", "samples", "epochs", "steps_a_push"), [("epochs", 50, 3, 4), ("validated", 30, 1, 3), ("saved", 40, 1, 4)]
)
def test_every_sample_is_trained_on_once_and_counts_in_weight_steps_and_schedule(
    two, name, samples, epochs, steps_a_push
) -> None:
    """Each step moves the weight by one; the second rank is slower. Pushes by the ledger's own count."""
    ranks = two(name)
    for epoch in range(epochs):
        assert sorted(n for rank in ranks for n in rank["seen"][epoch]) == list(range(samples))
    steps = samples * epochs
    meetings = {"epochs": 3, "validated": 3, "saved": 1}[name]  # where both ranks push what is left over
    saves = 3 if name == "saved" else 0
    for rank in ranks:
        assert (rank["weight"], rank["global_step"], rank["lr_steps"]) == (-steps, steps, steps)
        assert rank["samples"] == steps
        assert steps / steps_a_push <= rank["pushes"] <= steps / steps_a_push + 2 * meetings + saves


def test_ranks_validate_what_all_of_them_have_done(two) -> None:
    first, second = (rank["validations"] for rank in two("validated"))
    assert [step for step, _, _ in first] == [10, 20, 30]
    for (step, ours, weight), (other_step, theirs, other_weight) in zip(first, second, strict=True):
        assert step == other_step == ours + theirs
        assert weight == other_weight == -step


def test_steps_end_at_their_limit(two) -> None:
    for rank in two("max_steps"):
        assert (rank["weight"], rank["global_step"]) == (-13, 13)
    for rank in two("manual"):
        assert (rank["weight"], rank["other"], rank["global_step"]) == (-10, -10, 20)


def test_a_checkpoint_within_an_epoch_knows_what_no_push_has_brought(two) -> None:
    """Rank 0 saves in the middle of rounds: its own steps are in, those that rank 1 has kept are to be made again."""
    folder = two.folder
    for batch in (2, 5, 9):
        saved = torch.load(folder / f"middle-{batch}.ckpt", weights_only=True)
        epoch = saved["lightning_g2"]
        trained = epoch["next"] - len(epoch["loose"])
        assert trained == batch + 1
        assert saved["state_dict"]["weight"].item() == -trained
        assert saved["global_step"] == trained == saved["lr_schedulers"][0]["last_epoch"]
    epoch = torch.load(folder / "middle-5.ckpt", weights_only=True)["lightning_g2"]
    ranks = two("resumed")
    assert sum(len(rank["seen"][0]) for rank in ranks) == 40 - epoch["next"] + len(epoch["loose"])
    assert all((rank["weight"], rank["global_step"], rank["lr_steps"]) == (-40, 40, 40) for rank in ranks)


def test_two_ranks_that_push_every_sixteenth_step_learn_and_resume(two, one) -> None:
    """Plain Lightning comes to 0.13 of the first loss in as many steps, two ranks to 0.19, in whatever share."""
    ours, plain = two("learned"), facts_of(one)
    assert ours[0] == ours[1]
    assert ours[0]["steps"] == 768
    assert 768 / 16 <= ours[0]["pushes"] <= 768 / 16 + 2 * 24
    assert plain["learned"] < 0.2 * plain["untrained"]
    assert ours[0]["loss"] < 0.35 * plain["untrained"]
    assert ours[0]["moments_at_start"] == [0, 4], "a resume starts with rank 0's on every rank"
    kept = torch.load(two.folder / "learned.ckpt", weights_only=True)["lightning_g2_outer"]
    assert set(kept["state"]) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}


def test_one_rank_is_plain_lightning_up_to_rounding(one) -> None:
    """AdamW, clipping, accumulation of 3, a schedule; a fused step; float16 with an overflow; hooks of the step."""
    facts = facts_of(one)
    compared = {name: equal for name, equal in facts.items() if name.startswith(("32_", "16_"))}
    assert len(compared) == 14
    assert [name for name, equal in compared.items() if not equal] == []


def test_a_resume_of_one_rank_goes_on_bit_for_bit(one) -> None:
    """Saved twelve steps into an epoch, two into a round, with a delayed momentum."""
    facts = facts_of(one)
    resumed = {name: equal for name, equal in facts.items() if name.startswith("resumed_")}
    assert len(resumed) == 5
    assert [name for name, equal in resumed.items() if not equal] == []
    assert facts["pushes"] == 5 + (3 + 3) + 5 + 5, "rounds of five in epochs of 24, one of them cut by the checkpoint"
    kept = torch.load(one / "middle.ckpt", weights_only=True)["lightning_g2_outer"]
    assert kept["pushes"] == 5 + 3
    assert all(set(state) == {"momentum_buffer", "accumulated"} for state in kept["state"].values())
    assert {"net.0.weight", "net.2.bias"} <= set(kept["state"])


def test_other_strategies_resume_from_a_checkpoint_and_back(one) -> None:
    facts = facts_of(one)
    assert facts["under_auto"] == [96, 96], "global step, and the steps that AdamW has counted"
    assert facts["back"] == [120, 120]
