"""Fits with steps that ranks make themselves: two ranks, the second slower, or one rank against plain Lightning."""

import json
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from turns import wait_until

import lightning_g2

MODE, OUT = sys.argv[1], Path(sys.argv[2])
AS_IT_IS = {"local_steps": 4, "outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0}


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Net(pl.LightningModule):
    """Remembers every sample; each step moves the weight by exactly one."""

    def __init__(self, samples: int, *, val=False, manual=False, slow=0.02, saved=False) -> None:
        super().__init__()
        self.weight, self.other = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))
        self.samples, self.val, self.slow, self.saved = samples, val, slow, saved
        self.automatic_optimization = not manual
        self.seen: list[list[int]] = [[]]
        self.validations: list[tuple[int, int, float]] = []  # global_step, samples this rank has seen, weight
        self.at_end = None

    def train_dataloader(self):
        return DataLoader(Numbers(self.samples), shuffle=True)

    def val_dataloader(self):
        return DataLoader(Numbers(2)) if self.val else []

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            time.sleep(self.slow)
        if self.saved:
            self.take_turns(batch_idx)
        self.seen[-1] += [int(x) for x in batch.flatten()]
        if self.automatic_optimization:
            return self.weight + 0
        for optimizer, weight in zip(self.optimizers(), (self.weight, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(weight + 0)
            optimizer.step()
        return None

    def take_turns(self, batch_idx):
        """Rank 0 trains, and saves, while rank 1 has two steps of its own and goes no further."""
        if self.global_rank == 0 and batch_idx == 0:
            wait_until((OUT / "kept").exists)
        elif self.global_rank == 1 and batch_idx == 2:
            (OUT / "kept").touch()
            wait_until((OUT / "saved").exists)

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, sum(map(len, self.seen)), float(self.weight)))

    def on_train_epoch_end(self):
        self.seen.append([])

    def on_train_end(self):
        self.at_end = {"lr_steps": self.lr_schedulers().last_epoch if self.automatic_optimization else None}

    def configure_optimizers(self):
        sgd = torch.optim.SGD([self.weight], lr=1.0)
        if not self.automatic_optimization:
            return [sgd, torch.optim.SGD([self.other], lr=1.0)]
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Totals(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        totals = trainer.strategy.totals().values()
        self.pushes, self.samples = sum(t.pushes for t in totals), sum(t.samples for t in totals)


class Save(pl.Callback):
    """Rank 0 saves after batches of its own, in the middle of the other rank's rounds."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx in (2, 5, 9):
            trainer.save_checkpoint(OUT / f"middle-{batch_idx}.ckpt")
        if trainer.is_global_zero and batch_idx == 9:
            (OUT / "saved").touch()


def trainer_of(strategy, callbacks=(), **options) -> pl.Trainer:
    defaults = {
        "devices": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **(defaults | options))


def fit(name: str, net: Net, *, ckpt=None, callbacks=(), options=AS_IT_IS, **trainer_options) -> None:
    totals = Totals()
    strategy = lightning_g2.G2AsyncStrategy(gate="none", **options)
    trainer = trainer_of(strategy, [totals, *callbacks], **trainer_options)
    trainer.fit(net, ckpt_path=ckpt, weights_only=True if ckpt else None)
    facts = {
        "seen": net.seen[:-1], "validations": net.validations, "global_step": trainer.global_step,
        "weight": float(net.weight), "other": float(net.other), "pushes": totals.pushes, "samples": totals.samples,
        **net.at_end,
    }  # fmt: skip
    (OUT / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(facts))


class Curve(pl.LightningModule):
    """A small regression, whose loss on all its data is what counts."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        pl.seed_everything(3, verbose=False)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.x = torch.randn(512, 4)
        self.y = self.x.prod(1, keepdim=True).tanh() + self.x.sum(1, keepdim=True).sin()

    def train_dataloader(self):
        return DataLoader(torch.utils.data.TensorDataset(self.x, self.y), batch_size=16, shuffle=True)

    def on_train_start(self):
        self.moments = len(self.trainer.optimizers[0].state)

    def loss(self, x, y):
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def learn() -> None:
    """The same training by two ranks that push every sixteenth step, with the default gate; then one epoch more."""
    options = {"local_steps": 16, "outer_momentum": 0.5}
    module, totals = Curve(1e-2), Totals()
    trainer = trainer_of(lightning_g2.G2AsyncStrategy(**options), [totals], max_epochs=24)
    trainer.fit(module)
    trainer.save_checkpoint(OUT / "learned.ckpt")
    facts = {"loss": module.loss(module.x, module.y).item(), "pushes": totals.pushes, "steps": trainer.global_step}
    again = Curve(1e-2)
    trainer = trainer_of(lightning_g2.G2AsyncStrategy(**options), max_epochs=25)
    trainer.fit(again, ckpt_path=OUT / "learned.ckpt", weights_only=True)
    facts["moments_at_start"] = [module.moments, again.moments]
    (OUT / f"learned-{trainer.global_rank}.json").write_text(json.dumps(facts))


def two() -> None:
    pl.seed_everything(7, verbose=False)
    fit("epochs", Net(50), max_epochs=3)
    fit("validated", Net(30, val=True), val_check_interval=10, options=AS_IT_IS | {"local_steps": 3})
    fit("max_steps", Net(10), max_steps=13, max_epochs=-1)
    fit("manual", Net(30, manual=True), max_steps=20, max_epochs=-1)
    fit("saved", Net(40, saved=True), callbacks=[Save()])
    fit("resumed", Net(40), ckpt=OUT / "middle-5.ckpt")
    learn()


class Whole(pl.LightningModule):
    """AdamW, fused in float32; clipping, a schedule, a frozen and an unused layer; an overflow in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.unused, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
        self.hooks: list[str] = []

    def train_dataloader(self):
        # Its second half is its first: Lightning goes on in an epoch with the epoch's first batch.
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
        return DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * float("inf") if self.trainer.precision == "16-mixed" and batch_idx == 5 else loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=1e-2, weight_decay=0.1, fused=self.trainer.precision[:2] == "32"
        )
        optimizer.register_step_pre_hook(lambda *_: self.hooks.append("pre"))
        optimizer.register_step_post_hook(lambda *_: self.hooks.append("post"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(OUT / "middle.ckpt")


def whole(strategy, *, ckpt=None, callbacks=(), **options) -> tuple[pl.Trainer, Whole, dict]:
    pl.seed_everything(5, verbose=False)
    module = Whole()
    trainer = trainer_of(strategy, callbacks, **({"devices": 1, "max_epochs": 4, "gradient_clip_val": 0.5} | options))
    trainer.fit(module, ckpt_path=ckpt, weights_only=True if ckpt else None)
    trainer.save_checkpoint(OUT / "end.ckpt")
    return trainer, module, torch.load(OUT / "end.ckpt", weights_only=True)


def close(a, b, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k], tolerance) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return a == b


def one() -> None:
    facts, strategy = {}, lightning_g2.G2AsyncStrategy
    curve = Curve(1e-2)
    facts["untrained"] = curve.loss(curve.x, curve.y).item()
    trainer_of("auto", devices=1, max_epochs=24).fit(curve)
    facts["learned"] = curve.loss(curve.x, curve.y).item()
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops")
    for name, options in {"32": {"accumulate_grad_batches": 3}, "16": {"precision": "16-mixed"}}.items():
        _, plain, expected = whole("auto", **options)
        _, ours, state = whole(strategy(**AS_IT_IS), **options)
        facts |= {f"{name}_{key}": close(expected[key], state[key], 1e-5) for key in keys}
        facts[f"{name}_hooks"] = plain.hooks == ours.hooks
        facts[f"{name}_unused"] = all(
            torch.equal(p, q)
            for layer in ("unused", "frozen")
            for p, q in zip(getattr(plain, layer).parameters(), getattr(ours, layer).parameters(), strict=True)
        )
    outer = {"local_steps": 5, "outer": "delayed_nesterov", "outer_delay": 3}
    totals = Totals()
    _, _, straight = whole(strategy(**outer), callbacks=[SaveAt(36), totals])
    facts["pushes"] = totals.pushes
    _, _, resumed = whole(strategy(**outer), ckpt=OUT / "middle.ckpt")
    facts |= {f"resumed_{key}": close(straight[key], resumed[key], 0.0) for key in (*keys[:4], "lightning_g2_outer")}
    _, _, under_auto = whole("auto", ckpt=OUT / "middle.ckpt")
    facts["under_auto"] = [under_auto["global_step"], float(under_auto["optimizer_states"][0]["state"][0]["step"])]
    torch.save(under_auto, OUT / "auto.ckpt")
    _, _, back = whole(strategy(**outer), ckpt=OUT / "auto.ckpt", max_epochs=5)
    facts["back"] = [back["global_step"], float(back["optimizer_states"][0]["state"][0]["step"])]
    (OUT / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    two() if MODE == "two" else one()
