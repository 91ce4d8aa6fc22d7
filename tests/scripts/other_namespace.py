"""A project that has Lightning by its other name."""

import os
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", (self.layer(batch[0]) - 1).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    assert issubclass(lightning_g2.G2RoutingCallback, pl.Callback)
    pl.seed_everything(0)
    net, data = Net(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    losses = []
    for strategy in ("g2async_fork", "g2async"):
        if strategy == "g2async_fork" and "LOCAL_RANK" in os.environ:
            continue  # a rank that runs this script again takes part in what starts ranks by script
        trainer = pl.Trainer(
            strategy=strategy, devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[lightning_g2.G2RoutingCallback("none")],
        )  # fmt: skip
        trainer.fit(net, data, data)
        losses.append(trainer.callback_metrics["loss"])
    assert losses == sorted(losses, reverse=True), losses
    assert not any(name.split(".")[0] == "lightning" for name in sys.modules), "its modules are not loaded twice"
    import lightning.pytorch

    assert lightning.pytorch.Callback is not pl.Callback
    Path(sys.argv[1], f"rank{trainer.global_rank}").touch()
