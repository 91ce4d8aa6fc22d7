"""Three ranks of unequal speed, dropout and clipping; every push is recorded, and the weights are kept."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2


def data() -> TensorDataset:
    drawn = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn, drawn[:, :2].cumsum(dim=1))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2)
        )

    def loss(self, batch):
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


def main(out: Path) -> None:
    pl.seed_everything(3, verbose=False)
    model = Net()
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    strategy = lightning_g2.G2AsyncStrategy(gate="g2", gate_options={"beta": 4.0}, record=str(out / "run.jsonl"))
    trainer = pl.Trainer(
        strategy=strategy, devices=3, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        callbacks=[lightning_g2.StragglerCallback(rank=2, seconds=0.03)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(data(), batch_size=4, shuffle=True))
    if trainer.global_rank == 0:
        torch.save({"first": first, "last": model.state_dict()}, out / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
