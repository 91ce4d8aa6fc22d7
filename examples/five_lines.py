"""The five lines that turn any Lightning script asynchronous: two ranks on the CPU, one slowed down on purpose."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2


class Regression(pl.LightningModule):
    """A small network that learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean squared error."""
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """The same, logged."""
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any torch optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    trainer = pl.Trainer(
        strategy="g2async",  # after `import lightning_g2`, this word is all it takes
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[lightning_g2.StragglerCallback(rank=1, seconds=0.01)],  # only to have something to be robust against
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=256))
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
