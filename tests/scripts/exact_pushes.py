"""All ranks push all-ones gradients on a zero vector: SGD with lr 1 ends at exactly minus the number of pushes.

    python tests/scripts/exact_pushes.py RANKS PUSHES SIZE FOLDER TRANSPORT:PULL...

Each rank writes for each case what it has seen; pushes are those of one rank, the size is in numbers.
"""

import json
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from turns import wait_until

import lightning_g2

RANKS, PUSHES, SIZE = (int(word) for word in sys.argv[1:4])
OUT, CASES = Path(sys.argv[4]), sys.argv[5:]


class Ones(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))
        self.uniform = True
        self.pulls = 0

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        if self.global_rank == RANKS - 1:
            time.sleep(0.01)  # one rank is slow, so that pushes of the others overtake its own
            if batch_idx == 0:
                wait_until(lambda: self.trainer.strategy.view().version >= 2)
        return self.weight.sum()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.pulls += 1
        self.uniform &= bool((self.weight == self.weight[0]).all())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Totals(pl.Callback):
    totals = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.totals = trainer.strategy.totals()
        self.version = trainer.strategy.view().version


def fit(transport: str, pull: str) -> tuple[int, dict]:
    totals, module = Totals(), Ones()
    strategy = lightning_g2.G2AsyncStrategy(gate="none", transport=transport, pull=pull, dispatch="static")
    trainer = pl.Trainer(
        strategy=strategy, devices=RANKS, accelerator="cpu", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[totals],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(RANKS * PUSHES, 1)), batch_size=1))
    return trainer.global_rank, {
        "low": module.weight.min().item(), "high": module.weight.max().item(), "uniform": module.uniform,
        "pulls": module.pulls, "version": totals.version, "pushes": {r: t.pushes for r, t in totals.totals.items()},
        "staleness_max": max(t.staleness_max for t in totals.totals.values()),
    }  # fmt: skip


if __name__ == "__main__":
    for case in CASES:
        rank, facts = fit(*case.split(":"))
        (OUT / f"{case}-{rank}.json").write_text(json.dumps(facts))
