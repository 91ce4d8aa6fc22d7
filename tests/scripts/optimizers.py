"""Optimizers under manual optimization, one rank against plain Lightning: torch's own, the script's own, with hooks."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT = Path(sys.argv[1])
STEPS = 5


class Counting(torch.optim.Optimizer):
    """Defined in the script; keeps an attribute, state in its group, and the last gradient itself."""

    def __init__(self, params, lr, scale):
        super().__init__(params, {"lr": lr, "k": 0, "scale": scale})
        self.calls = 0

    def step(self, closure):
        closure()
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].get("last", p.grad)
                    self.state[p]["last"] = p.grad
                    with torch.no_grad():
                        p.add_(p.grad + last, alpha=-group["lr"] * group["scale"](group["k"]) / self.calls)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, shares its groups, and holds parameters in an attribute."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups
        self.held = [p for group in self.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.held]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.held, self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Sharp(torch.optim.Optimizer):
    """Steps off the weights and back, and has an inner optimizer make the step."""

    def __init__(self, params, inner, **options):
        super().__init__(params, {"rho": 0.05, **options})
        self.inner = inner(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = self.state[p].pop("old")
        self.inner.step()

    def step(self, closure=None):
        raise RuntimeError("only by hand")


def build(optim, layers):
    def take():
        layer = torch.nn.Linear(6, 4)
        layers.append(layer)
        return list(layer.parameters())

    def matrix():
        layer = torch.nn.Linear(6, 4, bias=False)
        layers.append(layer)
        return list(layer.parameters())

    inner = optim.SGD(take(), lr=0.1, momentum=0.9)
    return [
        optim.ASGD(take(), lr=0.01), optim.Adadelta(take(), lr=0.5), optim.Adafactor(take(), lr=0.01),
        optim.Adagrad(take(), lr=0.01, maximize=True), optim.Adam(take(), lr=torch.tensor(0.01), amsgrad=True),
        optim.AdamW(take(), lr=0.01, fused=True), optim.Adamax(take(), lr=0.01, foreach=True),
        optim.NAdam(take(), lr=0.01), optim.RAdam(take(), lr=0.01), optim.RMSprop(take(), lr=0.01, centered=True),
        optim.Rprop(take(), lr=0.01), optim.SGD(take(), lr=0.1, momentum=0.9, nesterov=True),
        *([optim.Muon(matrix(), lr=0.01)] if hasattr(optim, "Muon") else []),
        optim.AdamW([{"params": take(), "lr": 0.1}, {"params": take(), "weight_decay": 0.0, "betas": (0.5, 0.6)}]),
        Counting(take(), lr=0.01, scale=lambda k: 1.0 + 1.0 / k), Lookahead(inner), Sharp(take(), optim.SGD, lr=0.1),
    ]  # fmt: skip


class Zoo(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        layers = []
        self.built = build(torch.optim, layers)
        self.layers = torch.nn.ModuleList(layers)
        self.bag = torch.nn.Embedding(20, 3, sparse=True)
        self.row = torch.nn.Embedding(20, 1, sparse=True)
        self.built += [
            torch.optim.SparseAdam(self.bag.parameters(), lr=0.1),
            torch.optim.SGD(self.row.parameters(), lr=0.1),
        ]
        self.hooks = []
        hooked = self.built[0]
        hooked.register_step_pre_hook(lambda o, args, kwargs: self.hooks.append(("pre", o is hooked)))
        hooked.register_step_post_hook(lambda o, args, kwargs: self.hooks.append(("post", o is hooked)))
        hooked.register_step_pre_hook(self.halve)

    def halve(self, optimizer, args, kwargs):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad.mul_(0.5)

    def loss(self, x, words):
        dense = sum(layer(x).square().mean() for layer in self.layers)
        return dense + self.bag(words).square().mean() + self.row(words).square().mean() + self.bag(words[:2]).sum()

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for index, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))
            bare = self.built[index]
            if isinstance(bare, Sharp):
                bare.first_step()
                optimizer.zero_grad()
                self.manual_backward(self.loss(*batch))
                bare.second_step()
            elif isinstance(bare, Counting):
                optimizer.step(closure=lambda: None)
            else:
                optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return self.built


def run(strategy):
    pl.seed_everything(5, verbose=False)
    zoo = Zoo()
    data = TensorDataset(torch.randn(8 * STEPS, 6), torch.randint(0, 9, (8 * STEPS, 5)))
    trainer = pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = zoo.bag.weight.detach().clone()
    trainer.fit(zoo, DataLoader(data, batch_size=8))
    still = [bool(torch.equal(before[i], zoo.bag.weight[i])) for i in range(9, 20)]
    return zoo, trainer, still


def saved(optimizer):
    """Its state dictionary, without the empty states that stepping off the weights leaves behind on the rank."""
    state = optimizer.state_dict()
    return {**state, "state": {key: value for key, value in state["state"].items() if value}}


if __name__ == "__main__":
    from equality import same

    (plain, plain_trainer, _), (ours, trainer, still) = run("auto"), run(lightning_g2.G2AsyncStrategy(gate="g2"))
    names = [f"{i}:{type(o).__name__}" for i, o in enumerate(plain.built)]
    owner = {id(p): n for n, o in zip(names, plain.built, strict=True) for g in o.param_groups for p in g["params"]}
    pairs = zip(plain.named_parameters(), ours.named_parameters(), strict=True)
    differ = sorted({owner[id(p)] for (_, p), (_, q) in pairs if not torch.equal(p, q)})
    states = [
        n for n, a, b in zip(names, plain.built, ours.built, strict=True)
        if "Counting" not in n and not same(saved(a), saved(b))
    ]  # fmt: skip
    counting = [o for o in (*plain.built, *ours.built) if isinstance(o, Counting)]
    facts = {
        "optimizers": len(names), "weights_differ": differ, "states_differ": states,
        "untouched_rows_still": all(still), "touched_rows_moved": plain.bag.weight.isfinite().all().item(),
        "calls": [o.calls for o in counting], "k": [o.param_groups[0]["k"] for o in counting],
        "hooks": [plain.hooks, ours.hooks], "steps": [plain_trainer.global_step, trainer.global_step],
    }  # fmt: skip
    (OUT / "facts.json").write_text(json.dumps(facts))
