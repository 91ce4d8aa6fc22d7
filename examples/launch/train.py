"""What the recipes of this folder start: the same program on every host, told only how large the job is.

python train.py --nodes 1 --devices 2
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy


class Regression(pl.LightningModule):
    """A small network that learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="hosts")
    parser.add_argument("--devices", type=int, default=2, help="ranks on each host")
    parser.add_argument("--accelerator", default="cpu", help="cpu, or gpu where each rank has one")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=16)
    trainer = pl.Trainer(
        strategy=G2AsyncStrategy(), num_nodes=given.nodes, devices=given.devices, accelerator=given.accelerator,
        max_epochs=given.epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Regression(), data, data)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, val_loss {float(trainer.callback_metrics['val_loss']):.4f}")


if __name__ == "__main__":
    main()
