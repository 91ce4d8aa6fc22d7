"""Fits of two ranks that choose rounds by times of arrival, and one with a delayed momentum; every gradient is one."""

import json
import logging
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2

OUT, RANK = Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", 0))
BATCHES = 40


class Ones(pl.LightningModule):
    def __init__(self, **optimizer) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = optimizer
        self.decided_at_start = False

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.is_global_zero and batch_idx == 0:
            cadence = self.trainer.strategy._training.client.snapshot()[1].cadence
            self.decided_at_start = cadence is not None and cadence["decided"]

    def training_step(self, batch, batch_idx):
        return self.weight + 0 * batch[0].sum()

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], **({"lr": 1.0} | self.optimizer))


class Facts(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        view, totals = trainer.strategy.view(), trainer.strategy.totals()
        self.facts = {
            "version": view.version, "choice": None if view.choice is None else view.choice.rounds or 0,
            "pushes": sum(t.pushes for t in totals.values()), "late": sum(t.late for t in totals.values()),
        }  # fmt: skip


def fit(name: str, *, epochs: int = 1, resume: str | None = None, optimizer=None, **options) -> dict:
    module, facts = Ones(**(optimizer or {})), Facts()
    logger = TensorBoardLogger(OUT, name=name, version="") if RANK == 0 else False
    trainer = pl.Trainer(
        strategy=lightning_g2.G2AsyncStrategy(gate="none", dispatch="static", **options), devices=2, accelerator="cpu",
        logger=logger, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        max_epochs=epochs, callbacks=[facts], log_every_n_steps=4,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(2 * BATCHES, 1)))
    trainer.fit(module, loader, ckpt_path=None if resume is None else OUT / f"{resume}.ckpt")
    trainer.save_checkpoint(OUT / f"{name}.ckpt")
    return facts.facts | {"weight": module.weight.item(), "decided_at_start": module.decided_at_start}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").addHandler(logging.FileHandler(OUT / f"log{RANK}.txt"))
    delayed = {"aggregate": 2, "delayed_nesterov": True, "optimizer": {"lr": 0.5, "momentum": 0.5, "nesterov": True}}
    facts = {
        "dear": fit("dear", rounds="auto", staleness_cost=1000.0, aggregate=2, buffer_weights="fedbuff"),
        "resumed": fit("resumed", epochs=2, resume="dear", rounds="auto", staleness_cost=1000.0),
        "cheap": fit("cheap", rounds="auto", staleness_cost=0.0, transport="rpc", pull="prefetch"),
        "delayed": fit("delayed", **delayed),
        "delayed_resumed": fit("delayed_resumed", epochs=2, resume="delayed", **delayed),
    }  # fmt: skip
    (OUT / f"rank{RANK}.json").write_text(json.dumps(facts))
