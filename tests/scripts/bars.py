"""Lightning's two progress bars under two ranks; what they draw goes to standard output."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2  # noqa: F401 - registers the strategy


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    for bar in (pl.callbacks.TQDMProgressBar(leave=True), pl.callbacks.RichProgressBar(leave=True)):
        kind = type(bar)
        trainer = pl.Trainer(
            strategy="g2async", devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
            enable_model_summary=False, num_sanity_val_steps=0, callbacks=[bar],
        )  # fmt: skip
        val = DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=4)
        trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(103, 1)), batch_size=4), val)
        assert type(bar) is kind, "the user's bar is given back"
