"""Two ranks: adapters on a frozen base, a transformer with random weights, and the monitor's histograms."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_g2 import G2AsyncStrategy
from lightning_g2.callbacks import G2MonitorCallback

OUT = Path(sys.argv[1])


class LowRank(torch.nn.Module):
    """A frozen linear layer and a trained change of rank 2 beside it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features) / base.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses, self.pushed_bytes = [], 0
        self.net = torch.nn.Sequential(
            LowRank(torch.nn.Linear(64, 64)), torch.nn.Tanh(), LowRank(torch.nn.Linear(64, 1))
        )

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.pushed_bytes = self.trainer.strategy._training.client.layout.size_bytes()


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses = []
        config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        self.model = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(net: pl.LightningModule, data: TensorDataset, **options: Any) -> dict[str, Any]:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = pl.Trainer(**{
        "strategy": G2AsyncStrategy(dispatch="static"),  # either rank has enough steps to learn
        "devices": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, **options,
    })  # fmt: skip
    trainer.fit(net, DataLoader(data, batch_size=8, shuffle=True))
    after = {name: value.clone() for name, value in net.state_dict().items()}
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    return {"losses": net.losses, "moved": moved, "state": after, "steps": trainer.global_step}


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    x = torch.randn(256, 64)
    facts = {}
    net = Adapted()
    monitor = G2MonitorCallback(log_every_n_steps=50)
    facts["adapters"] = fit(
        net, TensorDataset(x, x[:, :4].sum(1, keepdim=True).tanh()), max_steps=200, max_epochs=-1,
        callbacks=[monitor], logger=TensorBoardLogger(OUT, name="board", version=0),
    ) | {"bytes": net.pushed_bytes}  # fmt: skip
    tokens = (torch.arange(16)[None] * torch.randint(1, 4, (128, 1)) + torch.randint(0, 8, (128, 1))) % 32
    facts["language"] = fit(Language(), TensorDataset(tokens), max_epochs=6)
    torch.save(facts, OUT / f"adapters{torch.distributed.get_rank()}.pt")
