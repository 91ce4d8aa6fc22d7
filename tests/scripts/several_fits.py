"""validate, fit, fit again, test and predict in one script of two ranks; nothing may hang or be left behind."""

import os
import sys
import threading
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from turns import wait_until

import lightning_g2  # noqa: F401 - registers the strategy


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def _loss(self, batch):
        return (self.layer(batch[0]) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(**options):
    return pl.Trainer(
        strategy="g2async", devices=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, **options,
    )  # fmt: skip


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    net, data = Net(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    first = trainer(max_epochs=2)
    before = first.validate(net, data, verbose=False)[0]["loss"]
    first.fit(net, data, data)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    middle = first.validate(net, data, verbose=False)[0]["loss"]
    second = trainer(max_epochs=2)
    second.fit(net, data, data)
    after = second.test(net, data, verbose=False)[0]["loss"]
    predictions = torch.cat(second.predict(net, data))
    assert after < middle < before, (before, middle, after)
    assert predictions.shape == (32, 1)
    # What leaks from fit to fit stays; what is on its way out goes.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors and threading.active_count() <= threads)
    Path(sys.argv[1], f"rank{second.global_rank}").touch()
