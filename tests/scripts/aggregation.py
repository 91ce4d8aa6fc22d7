"""Fits of three ranks with several pushes a version: buffers and rounds against DDP, and rounds with a straggler."""

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from turns import wait_until

import lightning_g2

OUT = Path(sys.argv[1])
RANK, RANKS, STRAGGLER = int(os.environ.get("LOCAL_RANK", 0)), 3, 2


class Net(pl.LightningModule):
    """A regression without dropout: after every version its weights are what the mean gradient makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Count(pl.LightningModule):
    """Every gradient is one, so the weight is minus the versions.

    Args:
        straggles: in each epoch one rank begins before all others, and ends its first batch when they have made two
            versions without it.
        awaits: a file without which ranks other than the first do not end a batch.
    """

    def __init__(self, *, straggles: bool, awaits: Path | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.straggles, self.awaits = straggles, awaits
        self.seen: list[int] = []
        self.validated: list[float] = []
        self.first = True

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        if self.awaits is not None and self.global_rank > 0:
            wait_until(self.awaits.exists)
        if self.straggles and self.first:
            begun = OUT / f"begun-{self.trainer.strategy.options.transport}-{self.current_epoch}"
            base = -int(self.weight)
            if self.global_rank == STRAGGLER:
                begun.touch()
            wait_until(
                lambda: (
                    self.trainer.strategy.view().version >= base + 2
                    if self.global_rank == STRAGGLER
                    else begun.exists()
                )
            )
        self.first = False
        return self.weight + 0

    def validation_step(self, batch, batch_idx):
        self.log("weight", self.weight.detach(), sync_dist=True)

    def on_validation_end(self):
        self.validated.append(self.weight.item())

    def on_train_epoch_end(self):
        self.first = True

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)


class Totals(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        totals = trainer.strategy.totals()
        self.facts = {
            "version": trainer.strategy.view().version, "pushes": {r: t.pushes for r, t in totals.items()},
            "late": {r: t.late for r, t in totals.items()}, "samples": sum(t.samples for t in totals.values()),
            "late_samples": sum(t.late_samples for t in totals.values()),
        }  # fmt: skip


class SaveWithinEpoch(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx == 4:
            trainer.save_checkpoint(OUT / "middle.ckpt")
            (OUT / "saved").touch()


def trainer(strategy, **options) -> pl.Trainer:
    defaults = {
        "devices": RANKS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 2,
        "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **(defaults | options))


def regress(strategy, **options) -> list[float]:
    pl.seed_everything(7, verbose=False)
    net, data = Net(), torch.randn(36, 4, generator=torch.Generator().manual_seed(0))
    # Lightning would shuffle what it splits for DDP.
    split = DistributedSampler(TensorDataset(data), RANKS, RANK, shuffle=False) if strategy == "ddp" else None
    loader = DataLoader(TensorDataset(data), batch_size=4, sampler=split)
    trainer(strategy, **options).fit(net, loader, DataLoader(TensorDataset(data[:3])))
    return torch.nn.utils.parameters_to_vector(net.parameters()).tolist()


def count(*, straggles=False, awaits=None, callbacks=(), options=None, **trainer_options) -> dict:
    net, totals = Count(straggles=straggles, awaits=awaits), Totals()
    fit = trainer(
        lightning_g2.G2AsyncStrategy(gate="none", **options), callbacks=[totals, *callbacks], **trainer_options
    )
    fit.fit(net, DataLoader(Numbers(30)), DataLoader(Numbers(3)))
    return totals.facts | {
        "seen": net.seen, "validated": net.validated, "weight": net.weight.item(), "global_step": fit.global_step
    }  # fmt: skip


if __name__ == "__main__":
    ours = lightning_g2.G2AsyncStrategy
    facts = {
        "ddp": regress("ddp"),
        # A validation after every third batch is where all ranks have done as much.
        "aggregate": regress(ours(gate="none", aggregate=RANKS), val_check_interval=RANKS, limit_val_batches=1),
        "rounds": regress(ours(gate="none", rounds=RANKS)),
        "dropped": count(
            straggles=True, options={"rounds": 2, "transport": "shm", "dispatch": "static"}, val_check_interval=9
        ),
        "gated": count(
            straggles=True, options={"rounds": 2, "late": "gate", "transport": "rpc", "pull": "prefetch"},
            val_check_interval=9,
        ),
        "interrupted": count(
            options={"aggregate": 2}, callbacks=[SaveWithinEpoch()], awaits=OUT / "saved", max_epochs=1
        ),
    }  # fmt: skip
    (OUT / f"rank{RANK}.json").write_text(json.dumps(facts))
