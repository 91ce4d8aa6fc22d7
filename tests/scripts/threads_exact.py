"""Threads whose every gradient is one, at a rate of one: each weight is minus the number of updates, at any moment."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy

OUT, RANKS, OPTIONS, TRAINER = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
BATCHES, SIZE, SLOW = 24, 3000, int(os.environ.get("SLOW_RANK", "-1"))


class Ones(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIZE, 1, bias=False) for _ in range(4))
        for layer in self.layers:
            torch.nn.init.zeros_(layer.weight)
        self.facts = {"ends": [], "logged": [], "validated": [], "threads": set(), "samples": []}

    def training_step(self, batch, batch_idx):
        self.facts["threads"].add(threading.current_thread().name)
        if self.global_rank == SLOW:
            time.sleep(0.05)
        self.log("number", batch[0][0, 0])
        return {"loss": sum(layer(torch.ones(1, SIZE)).sum() for layer in self.layers), "samples": batch[0][:, 0]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert torch.equal(outputs["samples"], batch[0][:, 0])
        self.facts["ends"].append(batch_idx)
        self.facts["samples"] += batch[0][:, 0].tolist()

    def on_train_epoch_end(self):
        self.facts["steps"] = self.trainer.global_step

    def validation_step(self, batch, batch_idx):
        self.facts["validated"].append([self.values(), self.trainer.global_step])

    def values(self) -> list[float]:
        return sorted({v for layer in self.layers for v in (layer.weight.min().item(), layer.weight.max().item())})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Follow(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.facts["logged"].append(
            [float(trainer.callback_metrics["number"]), float(batch[0][0, 0])]  # of this batch, not of a later one
        )

    def on_train_end(self, trainer, pl_module):
        totals, report = trainer.strategy.totals(), trainer.strategy.report
        pl_module.facts |= {
            "pushes": sum(t.pushes for t in totals.values()), "trained": sum(t.samples for t in totals.values()),
            "version": trainer.strategy.view().version, "peak": report.peak_graphs, "batches": report.batches,
            "ages": {name: sum(age.values()) for name, age in report.ages().items()},
        }  # fmt: skip


def fit(module: Ones, folder: Path, **options) -> pl.Trainer:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = pl.Trainer(
        strategy=G2AsyncStrategy(**OPTIONS), devices=RANKS, accelerator="cpu", logger=False,
        callbacks=[Follow(), saver], enable_progress_bar=False, enable_model_summary=False, max_epochs=2, **TRAINER,
    )  # fmt: skip
    numbers = torch.arange(2 * BATCHES).float()[:, None]
    loader = DataLoader(TensorDataset(numbers), batch_size=2, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(numbers[:1]), batch_size=1), **options)
    return trainer


if __name__ == "__main__":
    module = Ones()
    trainer = fit(module, OUT / "checkpoints")
    facts = module.facts | {
        "values": module.values(), "global_step": trainer.global_step, "threads": sorted(module.facts["threads"]),
        "left": [t.name for t in threading.enumerate() if t.name.startswith(("forward-", "backward-"))],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    }  # fmt: skip
    if trainer.is_global_zero:
        facts["saved"] = []
        for file in sorted((OUT / "checkpoints").glob("*.ckpt")):
            saved = torch.load(file, weights_only=True)
            values = sorted({v for w in saved["state_dict"].values() for v in (w.min().item(), w.max().item())})
            facts["saved"].append([values, saved["global_step"]])
    if RANKS == 1:
        saved = sorted((OUT / "checkpoints").glob("*.ckpt"), key=lambda f: f.stat().st_mtime_ns)[0]
        resumed = Ones()
        fit(resumed, OUT / "resumed", ckpt_path=saved)
        facts["resumed"] = resumed.values()
    (OUT / f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))
