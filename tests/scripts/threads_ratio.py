"""Staleness layer by layer over staleness of the whole in a real fit whose layers sleep: (M-1)/(2M) is expected.

Command: python tests/scripts/threads_ratio.py [batches]
"""

import random
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_g2 import G2AsyncStrategy

BATCHES = int(sys.argv[1]) if len(sys.argv) > 1 else 160
FORWARD_S, BACKWARD_S, SPREAD = 0.04, 0.08, 0.6
THREADS = {"forward_threads": 3, "backward_threads": 4}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleepers(pl.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(layers))

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            share = random.uniform(1 - SPREAD, 1 + SPREAD) / len(self.layers)
            x = Sleep.apply(layer(x), FORWARD_S * share, BACKWARD_S * share)
        return x.square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Keep(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        self.report = trainer.strategy.report


def run(layers: int, update: str):
    random.seed(0)
    keep = Keep()
    trainer = pl.Trainer(
        strategy=G2AsyncStrategy(servers=0, update=update, **THREADS), devices=1, accelerator="cpu", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[keep],
    )  # fmt: skip
    trainer.fit(Sleepers(layers), DataLoader(torch.ones(BATCHES, 1), batch_size=1))
    return keep.report


if __name__ == "__main__":
    for layers in (2, 4, 8, 16):
        by_layer, block = run(layers, "layer"), run(layers, "block")
        print(
            f"M={layers}: lag {by_layer.lag_mean:.2f} / {block.lag_mean:.2f} = {by_layer.lag_mean / block.lag_mean:.3f}"
            f" against {(layers - 1) / (2 * layers):.3f}; age {by_layer.age_mean:.2f}, {block.age_mean:.2f};"
            f" mixed reads {by_layer.mixed_reads:.2f}; peak graphs {by_layer.peak_graphs}"
        )
