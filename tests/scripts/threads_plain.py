"""One thread of each kind that take turns, without and with a server, against plain Lightning: bit for bit."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from equality import same
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_g2 import G2AsyncStrategy
from lightning_g2.tasks.gpt import ByteGPT

OUT = Path(sys.argv[1])
TURNS = {"forward_threads": 1, "backward_threads": 1, "max_graphs": 1}


class Net(pl.LightningModule):
    """BatchNorm, dropout, recurrent state, a layer that only some batches use, one that is frozen, skipped batches."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer, self.hooks, self.temperature = optimizer, [], 1.0
        self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
        self.cell, self.state = torch.nn.GRUCell(16, 16), None
        self.sometimes, self.frozen = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16).requires_grad_(False)
        self.last, self.mean = torch.nn.Linear(16, 1), MeanMetric()

    def loss(self, batch, batch_idx=0):
        x, y = batch
        x = torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1, self.training)
        if self.training:
            x = self.cell(x, self.state)
            self.state = x.detach()
        if batch_idx % 3 == 1:
            x = self.sometimes(x)
        return torch.nn.functional.mse_loss(self.last(self.frozen(x)) / self.temperature, y)

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            return None
        loss = self.loss(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean(loss)
        self.log_dict({"metric": self.mean, "number": float(batch_idx)})
        return {"loss": loss, "index": batch_idx} if batch_idx % 2 else loss

    def on_train_batch_start(self, batch, batch_idx):
        self.temperature = 1.0 + 0.1 * batch_idx  # the training step sees what hooks set
        self.hooks.append(("start", batch_idx, self.trainer.global_step))
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        outputs = {} if outputs is None else outputs
        self.hooks.append(("end", batch_idx, self.trainer.global_step, sorted(outputs)))

    def on_before_zero_grad(self, optimizer):
        self.hooks.append(("zero", self.trainer.global_step))

    def validation_step(self, batch, batch_idx):
        self.hooks.append(("validation", self.trainer.global_step))
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tied(ByteGPT):
    """A transformer whose embedding is its head."""

    hooks: tuple = ()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def run(module: pl.LightningModule, data: DataLoader, strategy: object, folder: str, **options: object) -> dict:
    trainer = pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_epochs=2, logger=CSVLogger(OUT / folder),
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    names = set(vars(module))
    trainer.fit(module, data, data if isinstance(module, Net) else None)
    rows = (OUT / folder / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    kept = [i for i, name in enumerate(rows[0].split(",")) if not name.startswith("g2/")]
    logged = [[row.split(",")[i] for i in kept] for row in rows]
    values = [i for i, name in enumerate(logged[0]) if name not in ("epoch", "step")]
    return {
        "changed": sorted(set(vars(module)) ^ names),  # attributes of the module, when all is over
        "weights": module.state_dict(), "moments": trainer.optimizers[0].state_dict(), "hooks": module.hooks,
        "steps": trainer.global_step, "state": getattr(module, "state", None),
        "logged": [row for row in logged if any(row[i] for i in values)],
        "schedule": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
    }  # fmt: skip


def net(optimizer: str, batches: int) -> tuple[pl.LightningModule, DataLoader]:
    pl.seed_everything(7, verbose=False)
    x = torch.randn(4 * batches, 8)
    return Net(optimizer), DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)


def gpt(_: str, batches: int) -> tuple[pl.LightningModule, DataLoader]:
    pl.seed_everything(7, verbose=False)
    tokens = torch.randint(256, (4 * batches, 9))
    return Tied(width=16, layers=2, heads=2, block_size=8), DataLoader(tokens, batch_size=4)


if __name__ == "__main__":
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3}
    norm = {"gradient_clip_val": 0.5, "val_check_interval": 3}
    cases = {
        "sgd": (net, "sgd", {"servers": 0, "weights": "stashed"}, clip),
        "adamw": (net, "adamw", {"servers": 0, "update": "block"}, norm),
        "server": (net, "adamw", {"weights": "stashed", "gate": "g2"}, clip),
        "block": (net, "sgd", {"update": "block"}, norm),
        "gpt": (gpt, "", {"weights": "stashed"}, {"precision": "bf16-mixed"}),
    }
    facts = {}
    for name, (build, optimizer, threads, options) in cases.items():
        plain = run(*build(optimizer, 8), "auto", f"{name}-plain", **options)
        ours = run(*build(optimizer, 8), G2AsyncStrategy(**TURNS, **threads), f"{name}-ours", **options)
        facts[name] = {
            "unequal": [key for key in plain if not same(plain[key], ours[key])], "steps": ours["steps"],
            "rows": len(ours["logged"]), "hooks": len(ours["hooks"]),
        }  # fmt: skip
        if facts[name]["unequal"]:
            facts[name]["plain"] = {k: str(plain[k])[:3000] for k in facts[name]["unequal"]}
            facts[name]["ours"] = {k: str(ours[k])[:3000] for k in facts[name]["unequal"]}
    (OUT / "facts.json").write_text(json.dumps(facts))
