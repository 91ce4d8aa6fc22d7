"""Parameters, hyper-parameters and precisions, one rank against plain Lightning, one fit after another."""

import json
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from equality import same
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT = Path(sys.argv[1])


class Base(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()


class Kinds(Base):
    """Parameters of every kind in one module."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.frozen, self.unused = torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(6, 6)
        self.later = torch.nn.Linear(6, 6).requires_grad_(False)
        self.brain = torch.nn.Parameter(torch.randn(6).bfloat16())
        self.wide = torch.nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.turn = torch.nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.count = torch.nn.Parameter(torch.tensor([2**60 + 1, -3]), requires_grad=False)
        self.empty, self.scalar = torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.tensor(1.5))
        self.transposed = torch.nn.Parameter(torch.randn(6, 3).t())
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6))
        self.words = torch.nn.Embedding(9, 6, sparse=True)

    def forward(self, x):
        x = self.later(self.normed(self.frozen(self.b(self.a(x)))))
        x = x * self.brain * self.wide * self.scalar + (self.turn * 1j * x).real + self.empty.sum()
        image = self.conv(torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last))
        return (x @ self.transposed.t().to(x)).mean() + image.mean() + self.words(torch.tensor([1, 1, 4])).sum()

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - 3).abs()

    def on_train_batch_start(self, batch, batch_idx):
        self.later.requires_grad_(batch_idx >= 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Lazy(Base):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.LazyLinear(5), torch.nn.Tanh(), torch.nn.LazyLinear(1))

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Schedule(Base):
    """Batch 1 returns None, batch 3 has a loss that touches no parameter; LambdaLR ends the rate after step 4."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.snapshots = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        return torch.zeros((), requires_grad=True) if batch_idx == 3 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.snapshots.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 6 else 0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class EditGroup(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.optimizers[0].param_groups[0].update(betas=(0.5, 0.7), weight_decay=0.3, eps=1e-4)


class Backbone(Base):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
        self.head, self.extra = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.backbone(x)) + self.extra(x)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.head.parameters() if p.requires_grad], lr=0.01)


class ByHand(pl.Callback):
    """Adds a group in the middle of an epoch, and takes it away again an epoch later."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        if trainer.current_epoch == 0 and batch_idx == 1:
            optimizer.add_param_group({"params": list(pl_module.extra.parameters()), "lr": 0.05})


class Plain(Base):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0].to(self.net[0].weight.dtype)).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


class Norms(pl.Callback):
    """What reaches the server, and the scaler's scale."""

    def __init__(self):
        self.norms, self.scales = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        training = getattr(trainer.strategy, "_training", None)
        client = None if training is None else training.client
        if client is not None and batch_idx == 0:
            push, norms = client.transport.push, self.norms

            def watched(packet, buffer):
                views = client.layout.views(buffer, packet.present)
                norms.append(float(torch.stack([v.norm() for v in views]).norm()))
                return push(packet, buffer)

            client.transport.push = watched

    def on_train_batch_end(self, trainer, *args):
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(None if scaler is None else scaler.get_scale())


def fit(module, strategy, *, epochs=1, batches=8, resume=None, save=None, **options):
    pl.seed_everything(3, verbose=False)
    net = module()
    data = torch.randn(4 * batches, 6, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(
        net, DataLoader(TensorDataset(data), batch_size=4), ckpt_path=resume, weights_only=False if resume else None
    )
    path = OUT / f"{save or module.__name__}.ckpt"
    trainer.save_checkpoint(path)
    return net, torch.load(path, weights_only=False), trainer


def pair(module, strategy=None, make=dict, **options):
    results = [fit(module, s, **options, **make()) for s in ("auto", strategy or "g2async")]
    (plain, a, _), (ours, b, _) = results
    differ = [n for n, value in a["state_dict"].items() if not same(value, b["state_dict"][n])]
    print(module.__name__, "differs in", differ, flush=True)
    equal = same(a["state_dict"], b["state_dict"]) and same(a["optimizer_states"], b["optimizer_states"])
    strides = [p.stride() for p in plain.parameters()] == [p.stride() for p in ours.parameters()]
    return equal and strides and a["global_step"] == b["global_step"], ours, b, results


def scaler():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3))


def master():
    return lightning_g2.G2AsyncStrategy(gate="none", master_dtype="float32")


if __name__ == "__main__":
    warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
    facts = {}
    pl.seed_everything(3, verbose=False)
    fresh = Kinds()
    facts["kinds"], kinds, _, _ = pair(Kinds)
    facts["kinds_finite"] = all(p.isfinite().all().item() for p in kinds.parameters())
    facts["kinds_still"] = all(
        torch.equal(getattr(kinds, n).weight, getattr(fresh, n).weight) for n in ("frozen", "unused")
    ) and torch.equal(kinds.count, fresh.count)
    facts["kinds_learn"] = not torch.equal(kinds.turn.imag, fresh.turn.imag) and not torch.equal(
        kinds.later.weight, fresh.later.weight
    )
    facts["tied"] = kinds.a.weight is kinds.b.weight
    facts["lazy"], *_ = pair(Lazy)
    facts["schedule"], scheduled, _, results = pair(Schedule, make=lambda: {"callbacks": [EditGroup()]})
    s = scheduled.snapshots
    facts["nothing_moves"] = torch.equal(s[0], s[1]) and torch.equal(s[2], s[3]) and torch.equal(s[6], s[7])
    facts["snapshots"] = same(results[0][0].snapshots, s)

    def unfreezing(at=1):
        return {"callbacks": [ByHand(), BackboneFinetuning(unfreeze_backbone_at_epoch=at, backbone_initial_lr=0.01)]}

    facts["groups"], grown, straight, _ = pair(Backbone, epochs=3, make=unfreezing)
    facts["groups_number"] = len(straight["optimizer_states"][0]["param_groups"])
    pl.seed_everything(3, verbose=False)
    facts["backbone_moved"] = not torch.equal(grown.backbone[0].weight, Backbone().backbone[0].weight)
    half = {}
    for s in ("auto", "g2async"):
        fit(Backbone, s, epochs=2, save=f"half-{s}", callbacks=[BackboneFinetuning(1, backbone_initial_lr=0.01)])
        again = [BackboneFinetuning(1, backbone_initial_lr=0.01)]
        half[s] = fit(Backbone, s, epochs=3, resume=OUT / f"half-{s}.ckpt", callbacks=again)[1]
    facts["groups_resumed"] = same(half["auto"]["state_dict"], half["g2async"]["state_dict"]) and same(
        half["auto"]["optimizer_states"], half["g2async"]["optimizer_states"]
    )
    norms = Norms()
    facts["16-mixed"], _, saved, _ = pair(
        Plain, batches=30, gradient_clip_val=0.1, make=lambda: {"plugins": [scaler()], "callbacks": [norms]}
    )
    facts["scale_dropped"] = norms.scales[-1] < 2.0**40
    facts["skipped"] = [len(norms.norms), int(saved["optimizer_states"][0]["state"][0]["step"])]
    facts["norm_max"] = max(norms.norms)
    for precision in ("bf16-mixed", "bf16-true", "16-true", "64-true"):
        facts[precision], net, _, _ = pair(Plain, precision=precision)
    net, whole, _ = fit(Plain, master(), epochs=2, precision="bf16-true")
    fit(Plain, master(), epochs=1, precision="bf16-true", save="half-master")
    _, resumed, _ = fit(Plain, master(), epochs=2, precision="bf16-true", resume=OUT / "half-master.ckpt")
    facts["master_resumed"] = same(whole["state_dict"], resumed["state_dict"]) and same(
        whole["optimizer_states"], resumed["optimizer_states"]
    )
    state = whole["optimizer_states"][0]["state"][0]
    facts["master_dtypes"] = sorted({str(v.dtype) for v in state.values()})
    facts["master_rounds"] = torch.equal(state["master_weight"].bfloat16(), whole["state_dict"]["net.0.weight"])
    _, plain, _ = fit(Plain, "auto", epochs=2, precision="bf16-true", resume=OUT / "half-master.ckpt")
    facts["master_resumes_in_plain"] = all(v.isfinite().all().item() for v in plain["state_dict"].values())
    (OUT / "facts.json").write_text(json.dumps(facts))
