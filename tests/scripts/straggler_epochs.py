"""How long three ranks take for two epochs when one is four times slower, against the time their speeds allow.

    OMP_NUM_THREADS=1 python tests/scripts/straggler_epochs.py [g2async|ddp] [batches] [step_s]

Compute is modelled by sleeping. Prints wall time, (total work) / (total speed), and their ratio.
"""

import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_g2  # noqa: F401 - registers the strategy

STRATEGY = sys.argv[1] if len(sys.argv) > 1 else "g2async"
BATCHES = int(sys.argv[2]) if len(sys.argv) > 2 else 120
STEP_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
RANKS, SLOWNESS, EPOCHS, VALIDATION_BATCHES = 3, 4, 2, 6


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def work(self, batch):
        time.sleep(STEP_S * (SLOWNESS if self.global_rank == RANKS - 1 else 1))
        return self.layer(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.work(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.work(batch) / SLOWNESS, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self):
        self.start = time.perf_counter()

    def on_train_end(self):
        self.seconds = time.perf_counter() - self.start


if __name__ == "__main__":
    net = Net()
    trainer = pl.Trainer(
        strategy=STRATEGY, devices=RANKS, accelerator="cpu", max_epochs=EPOCHS, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data, held_out = TensorDataset(torch.randn(4 * BATCHES, 8)), TensorDataset(torch.randn(4 * VALIDATION_BATCHES, 8))
    trainer.fit(net, DataLoader(data, batch_size=4), DataLoader(held_out, batch_size=4))
    if trainer.is_global_zero:
        speed = (RANKS - 1 + 1 / SLOWNESS) / STEP_S  # batches a second
        ideal = EPOCHS * (BATCHES + VALIDATION_BATCHES) / speed
        print(f"{STRATEGY}: {net.seconds:.2f} s; work / speed {ideal:.2f} s; ratio {net.seconds / ideal:.3f}")
